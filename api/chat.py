"""From a chat request's messages to a prompt and its images.

Owns: splitting messages into turns and image sources, per-image limits, and the work that makes
an engine request of them. Does not own: templates (prompt.py), fetching (media.py), sampling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import BadRequestError, ContextTooLongError, MediaError
from api.media import ImageSource, RequestMedia
from api.messages import ImagePart, Message, ResolutionFields, TextPart
from api.prompt import PlannedImage, Prompt, PromptBuilder, Turn
from api.schemas import ChatTemplateKwargs
from lm_engine.client import MediaItem, ModelInfo
from vision_encoder.plan import ResolutionLimit


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    sources: tuple[ImageSource, ...]
    """In the order of the indexes in the turns."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    prompt: Prompt
    media: tuple[MediaItem, ...]
    baseline: Prompt | None = None
    """The same with a neutral question (evidence.py), if one was asked for and fits."""


def read_messages(messages: Sequence[Message], limits: ResolutionFields | None) -> Conversation:
    """`limits` holds for images that carry none of their own."""
    turns: list[Turn] = []
    sources: list[ImageSource] = []
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        if message.content is None or isinstance(message.content, str):
            turns.append(Turn(role, message.content or "", message.name))
            continue
        parts: list[str | int] = []
        for index, part in enumerate(message.content):
            if isinstance(part, TextPart):
                parts.append(part.text)
            else:
                parts.append(len(sources))
                sources.append(_source(part, f"messages.{place}.content.{index}", limits))
        turns.append(Turn(role, tuple(parts), message.name))
    return Conversation(tuple(turns), tuple(sources))


def _source(part: ImagePart, param: str, limits: ResolutionFields | None) -> ImageSource:
    common = limits or ResolutionFields()
    limit = ResolutionLimit(
        min_pixels=part.min_pixels or common.min_pixels,
        max_pixels=part.max_pixels or common.max_pixels,
    )
    return ImageSource(part.image_url.url, param, part.image_url.detail, limit)


def check_images(conversation: Conversation, prompts: PromptBuilder, *, most: int) -> None:
    """Refuses images before anything is fetched. Raises BadRequestError."""
    if not conversation.sources:
        return
    first = conversation.sources[0].param
    if not prompts.sees_images:
        raise BadRequestError("This model does not take images; send text only.", param=first)
    if len(conversation.sources) > most:
        raise BadRequestError(
            f"The request has {len(conversation.sources)} images; this server takes at most "
            f"{most} per request.",
            param=conversation.sources[most].param,
        )


def template_arguments(given: ChatTemplateKwargs | None) -> dict[str, Any]:
    return {} if given is None else given.model_dump(exclude_none=True)


def build(
    conversation: Conversation,
    media: RequestMedia,
    prompts: PromptBuilder,
    info: ModelInfo,
    *,
    scope: tuple[bytes, ...],
    add_generation_prompt: bool,
    arguments: dict[str, Any],
    neutral: tuple[Turn, ...] | None = None,
) -> ChatPrompt:
    """CPU work for a thread: plans, keys, template, tokens. Raises ApiError."""
    items: list[MediaItem] = []
    if media.spooled:
        assert prompts.planner is not None
        items = media.items(media.plans(prompts.planner), scope)
        _check_rows(items, info)
    planned = [PlannedImage(item.key, item.plan) for item in items]

    def render(turns: tuple[Turn, ...]) -> Prompt:
        return prompts.chat(
            turns,
            planned,
            add_generation_prompt=add_generation_prompt,
            arguments=arguments,
            max_tokens=info.max_model_len,
        )

    prompt = render(conversation.turns)
    baseline = None
    if neutral is not None:
        with contextlib.suppress(ContextTooLongError):
            baseline = render(neutral)
    return ChatPrompt(prompt, tuple(items), baseline)


def _check_rows(items: Sequence[MediaItem], info: ModelInfo) -> None:
    for item in items:
        if item.plan.num_rows > info.embedding_rows:
            raise MediaError(
                f"The image at {item.param} takes {item.plan.num_rows} tokens; this server holds "
                f"at most {info.embedding_rows} at a time. Lower max_pixels or detail, or start "
                "the server with more --embedding-rows.",
                param=item.param,
            )
