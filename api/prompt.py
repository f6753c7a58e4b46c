"""From a conversation to a prompt of final length.

Owns: PromptBuilder - template, neutralised literals, image spans by position, M-RoPE positions -
and Prompt, its result. Does not own: which tokens a family's image takes (vision_encoder/grid.py),
the tokenizer, or HTTP shapes (chat.py turns those into turns).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import BadRequestError, ContextTooLongError, ServerError
from api.template import ChatTemplate
from api.tokenizer import TextTokenizer
from chunked_prefill.request import ImageSpan
from vision_encoder.grid import mrope_positions
from vision_encoder.plan import ImagePlan, ImagePlanner

Positions = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its text and images in the order in which they were sent."""

    role: str
    content: str | tuple[str | int, ...]
    """A string as sent, or parts: a string is text, an int the index of an image."""
    name: str | None = None
    """Of the participant; most templates do not show it."""


@dataclass(frozen=True, slots=True)
class PlannedImage:
    key: bytes
    plan: ImagePlan


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...] = ()
    positions: Positions | None = None
    position_delta: int = 0
    text: str | None = None
    """The rendered text, each run of image rows as one image token; None for given token ids."""

    @property
    def image_tokens(self) -> int:
        return sum(span.length for span in self.spans)


class PromptBuilder:
    """Thread-safe; its methods are CPU work and belong off the event loop."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        planner: ImagePlanner | None,
        *,
        placeholder: str | None = None,
        image_token: str | None = None,
    ):
        """`placeholder` is what the template writes for an image, `image_token` the token that
        stands for one embedding row; both None for a text model."""
        self.tokenizer = tokenizer
        self.template = template
        self.planner = planner
        self._placeholder = placeholder
        self._image_token = image_token
        self._image_id = tokenizer.token_id(image_token)
        self._inline = "".join(chr(0xF0000 + secrets.randbelow(0xFFF0)) for _ in range(16))

    @property
    def sees_images(self) -> bool:
        return self.planner is not None and self.template is not None

    def chat(
        self,
        turns: Sequence[Turn],
        images: Sequence[PlannedImage] = (),
        *,
        add_generation_prompt: bool = True,
        arguments: dict[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> Prompt:
        """The prompt of a conversation. Benign text gets the ids that Hugging Face's
        `apply_chat_template(..., tokenize=True)` gives.

        Raises BadRequestError (the template cannot take the conversation) or ContextTooLongError
        (text that certainly exceeds `max_tokens`, seen before it is tokenised).
        """
        if self.template is None:
            raise BadRequestError(
                "This model has no chat template. Use /v1/completions, or start the server with "
                "--chat-template.",
                param="messages",
            )
        self._check_length(sum(_text_length(turn) for turn in turns), max_tokens, "messages")
        text = self.template.render(
            self._messages(turns, self.template),
            add_generation_prompt=add_generation_prompt,
            **(arguments or {}),
        )
        text = text.replace(self._inline, self._placeholder or "")
        return self._splice(text, images)

    def text(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> Prompt:
        """A raw prompt: special-token literals in it are tokens, as in other servers."""
        self._check_length(len(text), max_tokens, "prompt")
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Prompt(token_ids=tuple(ids), text=text)

    def _check_length(self, chars: int, max_tokens: int | None, param: str) -> None:
        least = math.ceil(chars / self.tokenizer.longest_token_chars)
        if max_tokens is not None and least > max_tokens:
            raise ContextTooLongError(
                f"The prompt has {chars} characters, at least {least} tokens; the maximum context "
                f"of this model is {max_tokens} tokens. Shorten the prompt.",
                param=param,
            )

    def _messages(self, turns: Sequence[Turn], template: ChatTemplate) -> list[dict[str, Any]]:
        can = template.capabilities
        if turns[0].role == "system" and not can.system:
            raise BadRequestError(
                "This model's chat template has no system message. Put it into the first user "
                "message.",
                param="messages.0.role",
            )
        messages: list[dict[str, Any]] = []
        for turn in turns:
            message: dict[str, Any] = {"role": turn.role, "content": self._content(turn, template)}
            if turn.name is not None:
                message["name"] = self.tokenizer.mark(turn.name)
            messages.append(message)
        return messages

    def _content(self, turn: Turn, template: ChatTemplate) -> str | list[dict[str, str]]:
        can = template.capabilities
        trusted = turn.role == "assistant"
        if isinstance(turn.content, str):
            marked = self.tokenizer.mark(turn.content, trusted=trusted)
            return marked if can.strings else [{"type": "text", "text": marked}]
        parts = self._marked_parts(turn.content, trusted)
        leading = all(isinstance(part, int) for part in parts[: sum(_is_image(p) for p in parts)])
        has_image = any(map(_is_image, parts))
        if can.parts and (not has_image or (can.images and (can.ordered or leading))):
            return [
                {"type": "image"} if isinstance(part, int) else {"type": "text", "text": part}
                for part in parts
            ]
        # The template would lose the images or move them; written into the text, they stay.
        joined = self._join(parts)
        return joined if can.strings else [{"type": "text", "text": joined}]

    def _marked_parts(self, parts: tuple[str | int, ...], trusted: bool) -> list[str | int]:
        """Marks adjacent texts together, so that no literal arises where two of them meet."""
        marked: list[str | int] = []
        run: list[str] = []
        for part in (*parts, -1):
            if isinstance(part, str):
                run.append(part)
                continue
            marked.extend(self._mark_run(run, trusted))
            run = []
            marked.append(part)
        return marked[:-1]

    def _mark_run(self, run: list[str], trusted: bool) -> list[str]:
        if len(run) < 2:
            return [self.tokenizer.mark(text, trusted=trusted) for text in run]
        marked = [self.tokenizer.mark(text, trusted=trusted) for text in run]
        whole = self.tokenizer.mark("".join(run), trusted=trusted)
        if whole == "".join(marked):
            return marked
        return [whole]

    def _join(self, parts: list[str | int]) -> str:
        joined = ""
        for before, part in zip([None, *parts], parts, strict=False):
            if isinstance(part, int):
                joined += self._inline
            else:
                # Texts that were sent apart stay apart.
                joined += f"\n{part}" if isinstance(before, str) else part
        return joined

    def _splice(self, text: str, images: Sequence[PlannedImage]) -> Prompt:
        """Replaces each placeholder by its image's pieces, and finds the rows' positions."""
        runs: list[tuple[int, int, int]] = []  # (image, rows, first row)
        if self._placeholder is not None:
            between = text.split(self._placeholder)
            if len(between) - 1 != len(images):
                raise BadRequestError(
                    f"The model's chat template placed {len(between) - 1} images of {len(images)}.",
                    param="messages",
                )
            written = [between[0]]
            for index, image in enumerate(images):
                row = 0
                for piece in image.plan.pieces:
                    if isinstance(piece, int):
                        runs.append((index, piece, row))
                        row += piece
                        piece = self._image_token or ""
                    written.append(piece)
                written.append(between[index + 1])
            text = "".join(written)
        ids = self.tokenizer.encode(text)
        if not runs:
            return Prompt(token_ids=tuple(ids), text=self.tokenizer.unmark(text))
        return self._spans(ids, runs, images, self.tokenizer.unmark(text))

    def _spans(
        self,
        ids: list[int],
        runs: list[tuple[int, int, int]],
        images: Sequence[PlannedImage],
        text: str,
    ) -> Prompt:
        assert self._image_id is not None
        if ids.count(self._image_id) != len(runs):
            raise ServerError("The tokenizer did not keep the image tokens of this prompt.")
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        start = 0
        for image, rows, first_row in runs:
            place = ids.index(self._image_id, start)
            expanded += ids[start:place]
            spans.append(ImageSpan(len(expanded), rows, images[image].key, first_row))
            expanded += [self._image_id] * rows
            start = place + 1
        expanded += ids[start:]
        positions, delta = self._positions(len(expanded), spans, runs, images)
        return Prompt(tuple(expanded), tuple(spans), positions, delta, text)

    @staticmethod
    def _positions(
        length: int,
        spans: list[ImageSpan],
        runs: list[tuple[int, int, int]],
        images: Sequence[PlannedImage],
    ) -> tuple[Positions | None, int]:
        grids = [images[image].plan.merged_grid for image, _, _ in runs]
        if any(grid is None for grid in grids):
            return None, 0
        placed = [
            (span.offset, grid) for span, grid in zip(spans, grids, strict=True) if grid is not None
        ]
        return mrope_positions(length, placed)


def _is_image(part: str | int) -> bool:
    return isinstance(part, int)


def _text_length(turn: Turn) -> int:
    if isinstance(turn.content, str):
        return len(turn.content)
    return sum(len(part) for part in turn.content if isinstance(part, str))
