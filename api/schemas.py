"""What a client may send.

Owns: the request models of every route. A field is honoured, or known and refused (see
`_refuse`), or unknown and refused; nothing is ignored in silence.
Does not own: conversations (messages.py), ranges that depend on the model (sampling.py), or the
shapes of answers (answers.py).

Rules over several fields raise BadRequestError themselves: pydantic lets it through, and a
ValueError would lose the name of the field at fault.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from api.errors import BadRequestError, UnsupportedError
from api.messages import Messages, ResolutionFields, Strict
from lm_engine.admission import MAX_INTERVAL, MAX_SINKS, MIN_INTERVAL

MAX_STOP = 16
MAX_STOP_CHARS = 256
MAX_PROMPTS = 64

_INT64 = 2**63


class TextFormat(Strict):
    type: Literal["text"]


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


MAX_PRIORITY = 100


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


Label = Annotated[str | None, Field(max_length=1024)]
"""A caller's own name for something. It is written beside the request in the log (gate.py) and
changes nothing else; see `Generation.labels`."""
Metadata = dict[
    Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]
]


class EvidenceOptions(Strict):
    """Where an answer's attention went: what to report (api/evidence.py)."""

    layers: list[int] | None = Field(default=None, min_length=1, max_length=256)
    """Averaged over; the default is the middle third of the model's."""
    interval: int = Field(default=64, ge=MIN_INTERVAL, le=MAX_INTERVAL)
    sinks: int = Field(default=4, ge=0, le=MAX_SINKS)
    baseline: bool | None = None
    """Whether to compare with a neutral question; the default does where there is a question."""
    question: str | None = Field(default=None, min_length=1)
    """The question, as it stands in the last user message; the default is its last paragraph."""

    @model_validator(mode="after")
    def _consistent(self) -> EvidenceOptions:
        if self.question is not None and self.baseline is False:
            raise BadRequestError(
                "return_evidence.question is for the baseline; leave it out, or baseline.",
                param="return_evidence.question",
            )
        return self


def _evidence_tag(value: Any) -> str:
    return "@options" if isinstance(value, dict | EvidenceOptions) else "@flag"


Evidence = Annotated[
    Annotated[bool, Tag("@flag")] | Annotated[EvidenceOptions, Tag("@options")],
    Discriminator(_evidence_tag),
]


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
    user: Label = None
    top_k: int | None = Field(default=None, ge=-1, lt=_INT64)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)
    min_tokens: int | None = Field(default=None, ge=0, lt=_INT64)
    ignore_eos: bool | None = None
    priority: int | None = Field(default=None, ge=0, le=MAX_PRIORITY)
    """Larger runs later, and loses its memory to smaller ones; nobody gets before the default, 0:
    that would be at the cost of other callers."""
    stop_token_ids: list[int] | None = Field(default=None, max_length=128)
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    return_evidence: Evidence | None = None

    def labels(self) -> dict[str, Any]:
        """What the caller wants to find the request by."""
        return {} if self.user is None else {"user": self.user}

    @model_validator(mode="after")
    def _consistent(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options needs stream=true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequestError(
                "prompt_logprobs cannot be streamed; set stream=false.", param="prompt_logprobs"
            )
        if self.return_progress and not self.stream:
            raise BadRequestError("return_progress needs stream=true.", param="return_progress")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOP:
            raise BadRequestError(
                f"{len(stops)} stop strings; at most {MAX_STOP} are allowed.", param="stop"
            )
        if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
            raise BadRequestError(
                f"A stop string has 1 to {MAX_STOP_CHARS} characters.", param="stop"
            )
        return self


class ChatRequest(Generation):
    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=_INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: TextFormat | None = None
    metadata: Metadata | None = Field(default=None, max_length=16)
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    """Where several servers share the work, a key that sends like prompts to the same one. This is
    one server, which finds what prompts have in common without a key."""
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

    def labels(self) -> dict[str, Any]:
        names = ("safety_identifier", "metadata", "prompt_cache_key")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**super().labels(), **own}

    @model_validator(mode="after")
    def _chat_consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise BadRequestError(
                f"max_tokens {both[0]} and max_completion_tokens {both[1]} differ; send one.",
                param="max_completion_tokens",
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
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: ChatTemplateKwargs | None = None
    mm_processor_kwargs: ResolutionFields | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            name = "prompt" if self.prompt is None else "messages"
            raise BadRequestError("Send exactly one of prompt and messages.", param=name)
        for name in ("chat_template_kwargs", "mm_processor_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise BadRequestError(f"{name} needs messages.", param=name)
        asked = "add_special_tokens" in self.model_fields_set and self.add_special_tokens
        if self.prompt is None and asked:
            raise BadRequestError(
                "add_special_tokens needs prompt; a template writes its own.",
                param="add_special_tokens",
            )
        return self


class DetokenizeRequest(Strict):
    model: str | None = Field(default=None, max_length=1024)
    tokens: TokenIds
