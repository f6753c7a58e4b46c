"""The neutral question that an answer's evidence is compared with.

Owns: where in a conversation or a text the question stands, and its replacement. Does not own: what
is measured with it (evidence.py), or the fields' types (schemas.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from api.errors import BadRequestError
from api.prompt import Turn
from api.schemas import EvidenceOptions

NEUTRAL_QUESTION = "What is this text about?"

Asked = bool | EvidenceOptions | None
"""The field `return_evidence`."""


def options(asked: Asked) -> EvidenceOptions | None:
    """None when nothing is asked for."""
    if isinstance(asked, EvidenceOptions):
        return asked
    return EvidenceOptions() if asked else None


def wants_baseline(asked: Asked) -> bool:
    """Whether the client insists on one."""
    chosen = options(asked)
    return chosen is not None and chosen.baseline is True


def neutral_text(text: str, chosen: EvidenceOptions | None, param: str) -> str | None:
    """`text` with the neutral question for its own: for `question` where that is given, else for
    the last paragraph, or the last line of a text of one paragraph. None without a baseline.

    Raises BadRequestError when `question` is not in `text`.
    """
    if chosen is None or chosen.baseline is False:
        return None
    if chosen.question is not None:
        before, found, after = text.rpartition(chosen.question)
        if not found:
            raise _no_question(param)
        return before + NEUTRAL_QUESTION + after
    body = text.rstrip()
    for separator in ("\n\n", "\n"):
        before, found, _ = body.rpartition(separator)
        if found:
            return before + separator + NEUTRAL_QUESTION
    return NEUTRAL_QUESTION


def neutral_turns(turns: Sequence[Turn], asked: Asked) -> tuple[Turn, ...] | None:
    """The conversation with the neutral question in its last user message (the last text of it
    that has a question), images as they were. None without a baseline, or a user message.

    Raises BadRequestError when `question` is not in it.
    """
    chosen = options(asked)
    place = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=None)
    if chosen is None or chosen.baseline is False or place is None:
        return None
    turn, content = turns[place], turns[place].content
    if isinstance(content, str):
        text = neutral_text(content, chosen, f"messages.{place}.content")
        assert text is not None
        return (*turns[:place], replace(turn, content=text), *turns[place + 1 :])
    parts = list(content)
    wanted = chosen.question or ""
    for index in reversed(range(len(parts))):
        part = parts[index]
        if isinstance(part, str) and part.strip() and wanted in part:
            text = neutral_text(part, chosen, f"messages.{place}.content.{index}")
            assert text is not None
            parts[index] = text
            break
    else:
        if wanted:
            raise _no_question(f"messages.{place}.content")
        parts.append(NEUTRAL_QUESTION)
    return (*turns[:place], replace(turn, content=tuple(parts)), *turns[place + 1 :])


def _no_question(param: str) -> BadRequestError:
    return BadRequestError(
        f"return_evidence.question does not occur in {param}, where the neutral question would "
        "replace it.",
        param="return_evidence.question",
    )
