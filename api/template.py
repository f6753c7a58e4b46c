"""A model folder's chat template.

Owns: finding the template, rendering it in a sandbox as Hugging Face renders it, and finding out
what it can take (strings, lists of parts, images where they were put). Does not own: what is put
into it (prompt.py) or token ids (tokenizer.py).
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from api.errors import BadRequestError
from api.tokenizer import TokenizerFolderError, read_json

MAX_RENDERED_CHARS = 64 * 2**20


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; in serving, only a block."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusalError(jinja2.TemplateError):
    """The template itself said no, in words meant for the user."""


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerFolderError(
            f"The chat template does not compile: {error}. Pass a working one by --chat-template."
        ) from error


def find_template(folder: Path, override: Path | None = None) -> str | None:
    """The template's source: `override`, then the folder's own files, or None when it has none."""
    if override is not None:
        if not override.is_file():
            raise TokenizerFolderError(f"--chat-template: {override} is not a file.")
        return override.read_text(encoding="utf-8")
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list):  # named templates
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
        if isinstance(found, dict):
            found = found.get("default")
        if isinstance(found, str):
            return found
    return None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What rendering a few probes showed."""

    strings: bool
    """Whether a message's content may be a string."""
    parts: bool
    """Whether it may be a list of parts."""
    images: bool
    """Whether an image part yields the placeholder."""
    ordered: bool
    """Whether an image between two texts stays between them."""
    system: bool
    """Whether a system message may come first."""


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, special_tokens: dict[str, str], placeholder: str | None):
        """`placeholder`: what the template should write for an image; None for text models."""
        self.source = source
        self._special_tokens = special_tokens
        self._template = _compile(source)
        self.capabilities = self._probe(placeholder)

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **arguments: Any
    ) -> str:
        """Raises BadRequestError when the template refuses these messages."""
        try:
            text = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **arguments,
            )
        except TemplateRefusalError as refusal:
            raise BadRequestError(
                f"The model's chat template refuses these messages: {refusal}.", param="messages"
            ) from refusal
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise BadRequestError(
                "The model's chat template cannot render these messages.", param="messages"
            ) from error
        if len(text) > MAX_RENDERED_CHARS:
            raise BadRequestError("The rendered conversation is too long.", param="messages")
        return text

    def _try(self, *contents: Any, role: str = "user") -> str:
        messages = [{"role": role, "content": content} for content in contents]
        if role == "system":
            messages.append({"role": "user", "content": contents[0]})
        try:
            return self.render(messages, add_generation_prompt=True)
        except BadRequestError:
            return ""

    def _probe(self, placeholder: str | None) -> Capabilities:
        one, two = "probeone", "probetwo"
        text = {"type": "text", "text": one}
        strings = one in self._try(one)
        listed = self._try([text])
        parts = one in listed and "'type'" not in listed
        system = one in self._try(one if strings else [text], role="system")
        images = ordered = False
        if placeholder is not None and parts:
            mixed = self._try([text, {"type": "image"}, {"type": "text", "text": two}])
            places = [mixed.find(piece) for piece in (one, placeholder, two)]
            images = places[1] >= 0
            ordered = images and places == sorted(places)
        return Capabilities(strings, parts, images, ordered, system)
