"""What a client may send.

Owns: strict request models of every route. A field is honoured, or known and refused (see
`_refuse`), or unknown and refused; nothing is ignored in silence.
Does not own: ranges that depend on the model (sampling.py), or the shapes of answers (answers.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from api.errors import UnsupportedError

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_STOP = 16
MAX_STOP_CHARS = 256
MAX_PROMPTS = 64

_INT64 = 2**63


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


_UNSUPPORTED_PARTS = ("input_audio", "file", "refusal", "video_url", "image", "input_image")


def _part_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in _UNSUPPORTED_PARTS:
        raise UnsupportedError(
            f"Content parts of type '{kind}' are not supported; send 'text' or 'image_url'.",
            param="messages",
        )
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
    content: TextContent
    name: str | None = Field(default=None, max_length=256)
    refusal: None = None
    audio: None = None
    tool_calls: None = None
    function_call: None = None
    annotations: list[None] | None = Field(default=None, max_length=0)


def _message_tag(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    if role in ("tool", "function"):
        raise UnsupportedError(
            f"Messages with role '{role}' are not supported; use system, user or assistant.",
            param="messages",
        )
    if role == "assistant":
        return "@assistant"
    return "@system" if role in ("system", "developer") else "@user"


Message = Annotated[
    Annotated[SystemMessage, Tag("@system")]
    | Annotated[UserMessage, Tag("@user")]
    | Annotated[AssistantMessage, Tag("@assistant")],
    Discriminator(_message_tag),
]


class TextFormat(Strict):
    type: Literal["text"]


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatTemplateKwargs(Strict):
    """The template arguments that a client may set; a template sees no other."""

    enable_thinking: bool | None = None


def _refuse(data: Any, vacuous: dict[str, tuple[Any, ...]]) -> Any:
    """Drops known fields whose value asks for nothing, and refuses them otherwise."""
    if not isinstance(data, dict):
        return data
    kept = dict(data)
    for name, allowed in vacuous.items():
        if name not in kept:
            continue
        value = kept.pop(name)
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise UnsupportedError(
                f"'{name}' is not supported by this server. Remove it.", param=name
            )
    return kept


_GENERATION_VACUOUS: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "best_of": (None, 1),
    "priority": (None, 0),
    "echo": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
}

_CHAT_VACUOUS: dict[str, tuple[Any, ...]] = {
    **_GENERATION_VACUOUS,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "moderation": (None,),
    "prompt_cache_retention": (None,),
    "documents": (None, []),
    "chat_template": (None,),
    "continue_final_message": (None, False),
}


class Generation(Strict):
    """Fields that both generating routes share."""

    model: str | None = Field(default=None, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, lt=_INT64)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: str | list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024)
    user: str | None = Field(default=None, max_length=1024)
    top_k: int | None = Field(default=None, ge=-1, lt=_INT64)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)
    min_tokens: int | None = Field(default=None, ge=0, lt=_INT64)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=128)
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    return_token_ids: bool | None = None
    return_progress: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed; set stream=false")
        if self.return_progress and not self.stream:
            raise ValueError("return_progress needs stream=true")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOP:
            raise ValueError(f"{len(stops)} stop strings; at most {MAX_STOP} are allowed")
        if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        return self


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=_INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: TextFormat | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    safety_identifier: str | None = Field(default=None, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    add_generation_prompt: bool = True
    chat_template_kwargs: ChatTemplateKwargs | None = None
    mm_processor_kwargs: ResolutionFields | None = None

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, data: Any) -> Any:
        data = _refuse(data, _CHAT_VACUOUS)
        if isinstance(data, dict) and isinstance(data.get("response_format"), dict):
            kind = data["response_format"].get("type")
            if kind in ("json_object", "json_schema", "structural_tag"):
                raise UnsupportedError(
                    f"response_format of type '{kind}' is not supported; use 'text'.",
                    param="response_format.type",
                )
        return data

    @model_validator(mode="after")
    def _chat_consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"max_tokens {both[0]} and max_completion_tokens {both[1]} differ; send one"
            )
        return self


TokenIds = Annotated[list[int], Field(max_length=4_000_000)]


def _prompt_tag(value: Any) -> str:
    if not isinstance(value, list):
        return "@string"
    first = value[0] if value else None
    if isinstance(first, list):
        return "@lists"
    return "@strings" if isinstance(first, str) else "@ids"


Prompt = Annotated[
    Annotated[str, Tag("@string")]
    | Annotated[TokenIds, Tag("@ids")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS), Tag("@strings")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Tag("@lists")],
    Discriminator(_prompt_tag),
]


class CompletionRequest(Generation):
    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, data: Any) -> Any:
        return _refuse(data, _GENERATION_VACUOUS)


class TokenizeRequest(Strict):
    """Either `prompt` (as /v1/completions takes it) or `messages` (as the chat does). A raw prompt
    has no generation prompt, so that `add_generation_prompt` changes nothing for it."""

    model: str | None = Field(default=None, max_length=1024)
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: ChatTemplateKwargs | None = None
    mm_processor_kwargs: ResolutionFields | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send exactly one of prompt and messages")
        for name in ("chat_template_kwargs", "mm_processor_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise ValueError(f"{name} needs messages")
        asked = "add_special_tokens" in self.model_fields_set and self.add_special_tokens
        if self.prompt is None and asked:
            raise ValueError("add_special_tokens needs prompt; a template writes its own")
        return self


class DetokenizeRequest(Strict):
    model: str | None = Field(default=None, max_length=1024)
    tokens: TokenIds
