"""When a sequence ends, and what text it has so far.

Owns: incremental detokenisation, stop strings, and finish reasons, decided once and here, so that
streamed and unstreamed answers cannot differ. Does not own: choosing tokens (sampler.py) or how
text travels (outputs.py, api/).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from chunked_prefill.request import SamplingParams
from lm_engine.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class Advance:
    """What one token did to its sequence."""

    text: str
    """Text that may be shown now; never part of a stop string that may still complete."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class TextState:
    """Text of one sample. `push` every generated token in order."""

    __slots__ = ("_decoder", "_held", "_ids", "_longest", "_params", "_shown", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._held = ""
        """Decoded, not yet released: a stop string may begin in it."""
        self._shown = 0
        """Ids whose text has been decoded, released or held; those after it are bytes of a
        character that is not complete."""
        self._longest = max((len(s) for s in params.stop), default=0)

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def push(self, token_id: int, eos_ids: frozenset[int]) -> Advance:
        """Takes the next token. Admission has seen to it that max_tokens fits the context."""
        params = self._params
        self._ids.append(token_id)
        may_stop = len(self._ids) >= params.min_tokens
        if may_stop and token_id in params.stop_token_ids:
            return self._end("stop", token_id)
        if may_stop and not params.ignore_eos and token_id in eos_ids:
            return self._end("stop", None)
        fresh = self._decode_last()
        self._held += fresh
        if may_stop and fresh and (hit := self._stop_hit(len(fresh))) is not None:
            return hit
        if len(self._ids) >= params.max_tokens:
            return self._end("length", None)
        return Advance(self._release(self._safe_length()))

    def _end(self, reason: FinishReason, stop_reason: int | None) -> Advance:
        """Releases everything, also bytes of a character that was never completed."""
        end = len(self._ids) - (reason == "stop")
        rest = self._ids[self._shown : end]
        self._held += self._tokenizer.decode(rest, skip_special_tokens=True)
        return Advance(self._release(len(self._held)), reason, stop_reason)

    def _decode_last(self) -> str:
        """What the last id adds to the text; nothing while a character is incomplete."""
        try:
            fresh = self._decoder.step(self._tokenizer, self._ids[-1]) or ""
        except Exception:
            # With byte fallback, a character that is never completed changes how bytes before it
            # read (`\n` and half an emoji are two unknown characters), and the stream refuses to
            # go on. What was shown stays; the rest is decoded by itself.
            rest = self._ids[self._shown :]
            self._decoder = DecodeStream(ids=rest, skip_special_tokens=True)
            fresh = self._tokenizer.decode(rest, skip_special_tokens=True)
        if fresh:
            self._shown = len(self._ids)
        return fresh

    def _stop_hit(self, fresh: int) -> Advance | None:
        start = max(0, len(self._held) - fresh - self._longest + 1)
        found = [(at, s) for s in self._params.stop if (at := self._held.find(s, start)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda f: (f[0], -len(f[1])))
        keep = at + len(stop) if self._params.include_stop else at
        return Advance(self._release(keep), "stop", stop)

    def _safe_length(self) -> int:
        """Held characters that no stop string can still claim."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(s.startswith(tail) for s in self._params.stop):
                return len(self._held) - length
        return len(self._held)

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def token_bytes_table(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes of every token id: exact for byte-level vocabularies and byte-fallback pieces, the
    decoded text otherwise."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
    byte_level = "ByteLevel" in type(tokenizer.decoder).__name__ or '"ByteLevel"' in str(
        tokenizer.decoder
    )
    table: list[bytes] = []
    for token_id in range(size):
        piece = added.get(token_id)
        if piece is not None:
            table.append(piece.encode())
            continue
        piece = tokenizer.id_to_token(token_id) or ""
        if byte_level:
            table.append(bytes(_BYTE_OF_CHAR[c] for c in piece if c in _BYTE_OF_CHAR))
        elif len(piece) == 6 and piece.startswith("<0x"):
            table.append(bytes([int(piece[3:5], 16)]))
        else:
            table.append(piece.replace("\u2581", " ").encode())
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019): printable Latin-1
    stands for itself, the others are moved to 256 and up in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_alphabet()
