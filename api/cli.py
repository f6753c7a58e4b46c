"""The command line.

Owns: the verbs `serve`, `chat`, `config show` and `doctor`, their flags and exit codes.
Does not own: settings (config.py defines each flag once), or what a verb does.

Modules are imported by the verb that needs them, so that `--help` is quick.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from api.config import ConfigError, ServeConfig, Settings, load

app = App(
    name="longlens",
    help="Serves chat over images, exactly, with long contexts.",
    version_flags=["--version"],
    help_format="plaintext",
)
config_app = App(name="config", help="Settings and where their values come from.")
app.command(config_app)


def _version() -> str:
    from api.app import version

    return version()


app.version = _version


def _settings_verb(verb: Callable[[Settings], int], help_text: str) -> Callable[..., int]:
    """A command whose flags are ServeConfig's fields, plus --config.

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
    parameters.append(
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Path | None, Parameter(help="YAML file of settings")],
        )
    )

    def command(*args: Any, **kwargs: Any) -> int:
        given = inspect.signature(command).bind(*args, **kwargs).arguments
        file = given.pop("config", None)
        flags = {name: value for name, value in given.items() if value is not None}
        return verb(load(flags, file))

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


def _show(settings: Settings) -> int:
    values = settings.config.model_dump(mode="json")
    if values["api_key"] is not None:
        values["api_key"] = "(hidden)"
    if not sys.stdout.isatty():
        rows = {n: {"value": v, "source": settings.origins[n]} for n, v in values.items()}
        print(json.dumps(rows, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "source", "meaning", box=None)
    for name, value in values.items():
        origin = settings.origins[name]
        meaning = ServeConfig.model_fields[name].description
        table.add_row(name, str(value), origin, meaning, style="dim" if origin == "default" else "")
    Console().print(table)
    return 0


app.command(
    _settings_verb(
        _serve,
        "Serve MODEL over HTTP, the embedded demo if none is named. Each flag can also be set by "
        "LONGLENS_NAME or in the --config file; `longlens config show` lists all of them.",
    ),
    name="serve",
)
config_app.command(
    _settings_verb(_show, "Show each setting, its value, and where the value came from."),
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
    except (ConfigError, ModelFolderError, KeyFileError, TokenizerFolderError) as error:
        print(f"longlens: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
