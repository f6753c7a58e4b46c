"""Text to token ids and back, without torch.

Owns: TextTokenizer - the model folder's tokenizer.json, its special tokens, and the two ways of
reading a string: as template text, in which added tokens are tokens, and as text in which marked
literals are only characters. Does not own: chat templates (template.py), streaming detokenisation
(the engine decides what text a token adds).

How a literal stays a literal: before a template is rendered, the first character of each control
token that a user wrote is replaced by a marker (`mark`). The rendered text then contains control
tokens only where the template put them. When markers are present, those control tokens are
renamed to private strings, the markers are turned back, and a second tokenizer, identical but for
knowing the control tokens under their private names only, encodes the whole text in one pass. So
normalisation, prefix spaces and pre-tokenisation act exactly as they do for other texts.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from api.errors import BadRequestError


class TokenizerFolderError(Exception):
    """The folder's tokenizer cannot be used; the message says what is missing and the remedy."""


def _private_string() -> str:
    """Sixteen private-use characters (plane 15) that no client can guess."""
    return "".join(chr(0xF0000 + secrets.randbelow(0xFFF0)) for _ in range(16))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or {} when there is no such file."""
    if not path.is_file():
        return {}
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def _content(token: Any) -> str | None:
    """The text of a special token, which configurations write as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


@dataclass(frozen=True, slots=True)
class AddedToken:
    id: int
    content: str
    special: bool


def _first_characters(tokens: tuple[AddedToken, ...]) -> re.Pattern[str]:
    """Matches each character that begins one of the literals, overlapping literals included.

    Grouped by that character, because a pattern with a fixed beginning is searched fast.
    """
    rests: dict[str, list[str]] = {}
    for token in tokens:
        rests.setdefault(token.content[0], []).append(re.escape(token.content[1:]))
    groups = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    return re.compile("|".join(groups) or "(?!)")


class TextTokenizer:
    """Encodes and decodes with a folder's tokenizer.json. Thread-safe: nothing changes after
    `__init__`, and the library releases the GIL while it encodes."""

    def __init__(self, folder: Path, *, template: str = "", extra_control: tuple[str, ...] = ()):
        """`template`: the chat template's source; added tokens that it spells out are control
        tokens even when the tokenizer does not call them special. `extra_control`: further ones,
        such as a model's image placeholder."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerFolderError(
                f"{path} does not exist. Save the model with its fast tokenizer "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...) writes tokenizer.json)."
            )
        self.config = read_json(folder / "tokenizer_config.json")
        data = json.loads(path.read_text(encoding="utf-8"))
        data["truncation"] = data["padding"] = None
        self._add_configured_tokens(data)
        self._tokenizer = Tokenizer.from_str(json.dumps(data))
        self.added = tuple(
            AddedToken(index, token.content, token.special)
            for index, token in sorted(self._tokenizer.get_added_tokens_decoder().items())
        )
        self.special_tokens = self._named_specials()
        self.bos_id = self.token_id(self.special_tokens.get("bos_token"))
        self.longest_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._control = tuple(
            token
            for token in self.added
            if token.content.strip()
            and (token.special or token.content in template or token.content in extra_control)
        )
        self._strict = tuple(t for t in self._control if t.special or t.content in extra_control)
        self._open, self._close, self._rename = (_private_string() for _ in range(3))
        self._first_of_control = _first_characters(self._control)
        self._first_of_strict = _first_characters(self._strict)
        self._any_control = re.compile(
            "|".join(
                re.escape(token.content)
                for token in sorted(self._control, key=lambda t: len(t.content), reverse=True)
            )
            or "(?!)"
        )
        self._marked = re.compile(f"{self._open}([0-9]+){self._close}")
        self._guard, self._guard_ids = self._guarded(data)

    def _add_configured_tokens(self, data: dict[str, Any]) -> None:
        """Tokens that only tokenizer_config.json declares, as some older checkpoints do."""
        added = data["added_tokens"] = list(data.get("added_tokens") or [])
        known = {entry["content"] for entry in added}
        for index, token in (self.config.get("added_tokens_decoder") or {}).items():
            if token["content"] not in known:
                flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
                entry = {flag: bool(token.get(flag, False)) for flag in flags}
                added.append({"id": int(index), "content": token["content"], **entry})

    def _named_specials(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        found = {name: _content(self.config.get(name)) for name in (*names, "mask_token")}
        extra = self.config.get("extra_special_tokens")
        if isinstance(extra, dict):
            found |= {name: _content(token) for name, token in extra.items()}
        return {name: token for name, token in found.items() if token is not None}

    def _guarded(self, data: dict[str, Any]) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer that knows control tokens by private names only, and its ids -> ours."""
        names = {token.content: self._private_name(token) for token in self._control}
        renamed = dict(data)
        renamed["added_tokens"] = [
            {**entry, "content": names.get(entry["content"], entry["content"])}
            for entry in data["added_tokens"]
        ]
        # The post-processor refers to tokens by their old names, and nothing here needs it.
        renamed["post_processor"] = None
        guard = Tokenizer.from_str(json.dumps(renamed))
        ids = {}
        for token in self.added:
            private = guard.token_to_id(names.get(token.content, token.content))
            if private is None:  # a vocabulary that refuses new names would break the promise
                raise TokenizerFolderError(f"Cannot isolate the added token {token.content!r}.")
            ids[private] = token.id
        return guard, ids

    def _private_name(self, token: AddedToken) -> str:
        return f"{self._rename}{token.id}{self._close}"

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str | None) -> int | None:
        found = None if token is None else self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token; "" for an id that it lacks."""
        return self._tokenizer.id_to_token(token_id) or ""

    def mark(self, text: str, *, trusted: bool = False) -> str:
        """`text` with its control-token literals broken by markers.

        `trusted` (the assistant's own earlier words): only special tokens are broken; the
        others, such as a closing think tag, keep the meaning that the template gives them.
        """
        pattern = self._first_of_strict if trusted else self._first_of_control
        return pattern.sub(lambda m: f"{self._open}{ord(m.group())}{self._close}", text)

    def unmark(self, text: str) -> str:
        return self._marked.sub(lambda m: chr(int(m.group(1))), text)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text that may hold markers. Control tokens outside markers are tokens.

        `add_special_tokens` adds what the tokenizer's post-processor adds, and never a second
        BOS: a text that begins with the BOS literal keeps one.
        """
        if self._open in text:
            return self._encode_guarded(text)
        ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        if add_special_tokens and self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            return ids[1:]
        return ids

    def _encode_guarded(self, text: str) -> list[int]:
        names = {token.content: self._private_name(token) for token in self._control}
        renamed = self._any_control.sub(lambda m: names[m.group()], text)
        ids = self._guard.encode(self.unmark(renamed), add_special_tokens=False).ids
        control = {token.id for token in self._control}
        result = []
        for token_id in ids:
            own = self._guard_ids.get(token_id)
            if own is None and token_id in control:
                # The model's plain vocabulary spells this control token.
                raise BadRequestError(
                    "The text contains a control token that this model's tokenizer cannot "
                    "represent as plain text."
                )
            result.append(token_id if own is None else own)
        return result

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
