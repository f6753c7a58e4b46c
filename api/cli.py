"""The command line.

Owns: the verbs `serve`, `chat`, `config show` and `doctor`, their flags and exit codes, and the way
to those of plan_cli.py, bench_cli.py and tune_cli.py.
Does not own: settings (config.py defines each flag once), or what a verb does.

Modules are imported by the verb that needs them, so that `--help` is quick.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from api.bench_cli import bench
from api.config import ConfigError, ServeConfig, Settings, load
from api.environment import check_environment
from api.plan_cli import plan_app
from api.tune_cli import tune
from chunked_prefill.planner.devices import PlanError

app = App(
    name="longlens",
    help="Serves chat over images, exactly, with long contexts.",
    version_flags=["--version"],
    help_format="plaintext",
)
config_app = App(name="config", help="Settings and where their values come from.")
app.command(config_app)
app.command(plan_app)
app.command(bench)
app.command(tune)


def _version() -> str:
    from api.app import version

    return version()


app.version = _version


def _settings_verb(verb: Callable[..., int], help_text: str, **switches: str) -> Callable[..., int]:
    """A command whose flags are ServeConfig's fields, plus --config and `switches` (name -> help),
    which `verb` gets as keyword arguments.

    Values stay strings until ServeConfig reads them, so that flags, environment and file obey the
    same rules, and what was not given stays absent.
    """
    parameters = []
    for name, field in ServeConfig.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        shown = _shown_default(field.default)
        options: dict[str, Any] = {
            "help": f"{field.description}{shown}",
            "show": bool(extra.get("core")),
        }
        kind: Any = bool | None if field.annotation is bool else str | None
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        position = positional if name == "model" else inspect.Parameter.KEYWORD_ONLY
        parameters.append(
            inspect.Parameter(
                name, position, default=None, annotation=Annotated[kind, Parameter(**options)]
            )
        )
    own: dict[str, tuple[Any, Any, str]] = {
        "config": (Path | None, None, "YAML file of settings"),
        **{name: (bool, False, text) for name, text in switches.items()},
    }
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, Parameter(help=text, negative="")],
        )
        for name, (kind, default, text) in own.items()
    ]

    def command(*args: Any, **kwargs: Any) -> int:
        given = inspect.signature(command).bind(*args, **kwargs).arguments
        file = given.pop("config", None)
        switched = {name: given.pop(name, False) for name in switches}
        flags = {name: value for name, value in given.items() if value is not None}
        check_environment(os.environ)
        return verb(load(flags, file), **switched)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = help_text
    return command


def _shown_default(default: Any) -> str:
    if default in (None, False, True, ()):
        return ""
    return f" [{default}]"


def _serve(settings: Settings) -> int:
    from api.serve import run

    return run(settings.config)


def _show(settings: Settings, *, json: bool) -> int:
    values = settings.config.model_dump(mode="json")
    if values["api_key"] is not None:
        values["api_key"] = "(hidden)"
    if json:
        rows = {n: {"value": v, "source": settings.origins[n]} for n, v in values.items()}
        print(dumps(rows, indent=1))
        return 0
    # What somebody chose comes first: the rest is what any server has.
    names = sorted(values, key=lambda name: settings.origins[name] == "default")
    table = [(name, _shown(values[name]), settings.origins[name]) for name in names]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join((*cells, ServeConfig.model_fields[row[0]].description or "")))
    return 0


def _shown(value: Any) -> str:
    """A value as the file or the environment would write it."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


app.command(
    _settings_verb(
        _serve,
        "Serve MODEL over HTTP, the embedded demo if none is named. Each flag can also be set by "
        "LONGLENS_NAME or in the --config file; `longlens config show` lists all of them.",
    ),
    name="serve",
)
config_app.command(
    _settings_verb(
        _show,
        "Show each setting, its value, and where the value came from.",
        json="Print JSON for programs",
    ),
    name="show",
)


@app.command
def chat(
    question: str | None = None,
    *,
    url: str = "http://127.0.0.1:8000",
    image: tuple[Path, ...] = (),
    api_key: str | None = None,
    model: str | None = None,
    max_tokens: int | None = None,
) -> int:
    """Talk to a running server; without QUESTION, in a loop.

    Parameters
    ----------
    question
        Asked once; the answer is printed and the command ends.
    url
        The server's address.
    image
        File shown with the first question; may be repeated.
    api_key
        Key of the server.
    model
        Name of the model, where the server has several.
    max_tokens
        Most tokens of an answer.
    """
    from rich.console import Console

    from api.terminal_chat import ChatError, Conversation, run

    conversation = Conversation(url, api_key, model, max_tokens)
    console = Console()
    try:
        for path in image:
            conversation.add_image(path)
    except ChatError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    return run(conversation, console, question)


@app.command
def doctor() -> int:
    """Check this machine: Python, CPU, memory, packages, torch, GPU, cache, demo model."""
    from rich.console import Console

    from api.doctor import examine

    console = Console()
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    findings = examine()
    for finding in findings:
        console.print(
            f"[{colours[finding.verdict]}]{finding.verdict:>4}[/]  {finding.name}: {finding.what}"
        )
        if finding.remedy:
            console.print(f"      -> {finding.remedy}", markup=False)
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def main(arguments: list[str] | None = None) -> None:
    """The `longlens` command. User errors end with a message and code 1, without a traceback."""
    from api.auth import KeyFileError
    from api.model_folder import ModelFolderError
    from api.tokenizer import TokenizerFolderError

    try:
        code = app(arguments, result_action="return_value", exit_on_error=True)
    except (
        *(ConfigError, ModelFolderError, KeyFileError, TokenizerFolderError, PlanError),
    ) as error:
        print(f"longlens: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
