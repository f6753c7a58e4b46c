"""What a conversation may hold.

Owns: strict models of messages and of their parts, and the refusal of roles, parts and fields that
OpenAI defines and this server does not implement. Does not own: the fields around a conversation
(schemas.py), or what becomes of it (chat.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from api.errors import BadRequestError, UnsupportedError

MAX_MESSAGES = 4096
MAX_PARTS = 4096


class Strict(BaseModel):
    """Unknown fields are errors, and a string is never taken for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ImageURL(Strict):
    url: str = Field(min_length=1)
    detail: Literal["auto", "low", "high"] = "auto"


class ResolutionFields(Strict):
    """The cost of an image in the user's hands: bounds on its pixels after resizing."""

    min_pixels: int | None = Field(default=None, ge=1, le=2**31)
    max_pixels: int | None = Field(default=None, ge=1, le=2**31)

    @model_validator(mode="after")
    def _ordered(self) -> ResolutionFields:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} exceeds max_pixels {self.max_pixels}")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImagePart(ResolutionFields):
    type: Literal["image_url"]
    image_url: ImageURL


def _part_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "@image" if kind == "image_url" else "@text"


ContentPart = Annotated[
    Annotated[TextPart, Tag("@text")] | Annotated[ImagePart, Tag("@image")],
    Discriminator(_part_tag),
]


def _content_tag(value: Any) -> str:
    return "@parts" if isinstance(value, list | tuple) else "@string"


Content = Annotated[
    Annotated[str, Tag("@string")]
    | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS), Tag("@parts")],
    Discriminator(_content_tag),
]
TextContent = Annotated[
    Annotated[str, Tag("@string")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS), Tag("@parts")],
    Discriminator(_content_tag),
]


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: TextContent
    name: str | None = Field(default=None, max_length=256)


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = Field(default=None, max_length=256)


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: TextContent | None
    """Null, as OpenAI's answers may have it, is a turn without text."""
    name: str | None = Field(default=None, max_length=256)
    refusal: None = None
    audio: None = None
    tool_calls: list[None] | None = Field(default=None, max_length=0)
    function_call: None = None
    annotations: list[None] | None = Field(default=None, max_length=0)


def _message_tag(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    if role == "assistant":
        return "@assistant"
    return "@system" if role in ("system", "developer") else "@user"


_ROLES = ("system", "developer", "user", "assistant")
_UNSUPPORTED_ROLES = ("tool", "function")
_PARTS = ("text", "image_url")
_UNSUPPORTED_PARTS = ("input_audio", "file", "refusal", "video_url", "image", "input_image")
_UNSUPPORTED_IN_MESSAGES = ("tool_calls", "function_call", "refusal", "audio")


def _known_kinds(messages: Any) -> Any:
    """Refuses roles, parts and fields of messages that no model below describes, with the place at
    fault: a tagged union would name whichever member it falls back to."""
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        return messages
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        where = f"messages.{place}"
        _check_kind(message, "role", where, known=_ROLES, unsupported=_UNSUPPORTED_ROLES)
        for name in _UNSUPPORTED_IN_MESSAGES:
            if message.get(name):
                raise UnsupportedError(
                    f"'{name}' in messages is not supported by this server. Remove it.",
                    param=f"{where}.{name}",
                )
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                at = f"{where}.content.{index}"
                _check_kind(part, "type", at, known=_PARTS, unsupported=_UNSUPPORTED_PARTS)
    return messages


def _check_kind(
    value: dict[str, Any], name: str, where: str, *, known: tuple[str, ...], unsupported: Any
) -> None:
    kind = value.get(name)
    if kind in known or not isinstance(kind, str):
        return
    use = f"use {', '.join(known[:-1])} or {known[-1]}."
    if kind in unsupported:
        raise UnsupportedError(
            f"The {name} '{kind}' is not supported by this server; {use}", param=f"{where}.{name}"
        )
    raise BadRequestError(f"'{where}.{name}' is not known; {use}", param=f"{where}.{name}")


Message = Annotated[
    Annotated[SystemMessage, Tag("@system")]
    | Annotated[UserMessage, Tag("@user")]
    | Annotated[AssistantMessage, Tag("@assistant")],
    Discriminator(_message_tag),
]


Messages = Annotated[
    Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)],
    BeforeValidator(_known_kinds),
]
