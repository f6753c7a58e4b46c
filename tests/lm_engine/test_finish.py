"""Text, stop strings and finish reasons, with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from chunked_prefill.request import SamplingParams
from lm_engine.finish import Advance, TextState, token_bytes_table

EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, and an end token."""
    vocab = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == EOS
    return tokenizer


def play(
    tokenizer: Tokenizer, ids: Iterable[int], **params: object
) -> tuple[str, list[str], Advance]:
    """Pushes ids until the sequence ends; (text, deltas, last advance)."""
    state = TextState(tokenizer, SamplingParams(**{"max_tokens": 1000, **params}))  # type: ignore[arg-type]
    deltas = []
    advance = Advance("")
    for token_id in ids:
        advance = state.push(token_id, frozenset({EOS}))
        deltas.append(advance.text)
        if advance.finish_reason:
            break
    return "".join(deltas), deltas, advance


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids


def test_api_01_no_delta_shows_part_of_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one STOP two")
    text, deltas, last = play(tokenizer, ids, stop=("STOP",))
    assert text == "one "
    assert not any("S" in delta for delta in deltas)
    assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")


@pytest.mark.parametrize("end", ["length", "stop"])
def test_api_02_held_text_is_delivered_at_the_end(tokenizer: Tokenizer, end: str) -> None:
    ids = ids_of(tokenizer, "the last word")
    if end == "length":
        text, _, last = play(tokenizer, ids, stop=("wordXYZ",), max_tokens=len(ids))
    else:
        text, _, last = play(tokenizer, [*ids, EOS], stop=("wordXYZ",))
    assert text == "the last word"
    assert last.finish_reason == end


def test_tok_01_characters_of_many_bytes_are_never_split(tokenizer: Tokenizer) -> None:
    wanted = "\U0001f336\u0e17\u010f"
    text, deltas, _ = play(tokenizer, [*ids_of(tokenizer, wanted), EOS])
    assert text == wanted
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("wanted", ["   three", " one", "\ntwo\n\n", "a  b   c "])
def test_tok_05_spaces_survive(tokenizer: Tokenizer, wanted: str) -> None:
    assert play(tokenizer, [*ids_of(tokenizer, wanted), EOS])[0] == wanted


@given(ids=st.lists(st.integers(0, 255), max_size=30), stops=st.sampled_from([(), ("ab", "b\n")]))
def test_deltas_join_to_the_decoded_text(ids: list[int], stops: tuple[str, ...]) -> None:
    vocab = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    text, _, last = play(tokenizer, [*ids, EOS], stop=stops)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    if last.stop_reason is None:
        assert text == whole
    else:
        assert whole.startswith(text + str(last.stop_reason))


def test_ctx_05_finish_reasons(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "abcde")
    assert play(tokenizer, ids, max_tokens=5)[2].finish_reason == "length"
    assert play(tokenizer, [*ids, EOS], max_tokens=6)[2].finish_reason == "stop"
    assert play(tokenizer, ids, stop=("e",), max_tokens=5)[2].finish_reason == "stop"
    assert play(tokenizer, [EOS, *ids], ignore_eos=True, max_tokens=6)[2].finish_reason == "length"


def test_stop_token_ids_end_without_text(tokenizer: Tokenizer) -> None:
    a, b, c = ids_of(tokenizer, "abc")
    text, _, last = play(tokenizer, [a, b, c], stop_token_ids=(b,))
    assert text == "a"
    assert (last.finish_reason, last.stop_reason) == ("stop", b)


def test_min_tokens_holds_stops_back(tokenizer: Tokenizer) -> None:
    text, _, last = play(tokenizer, ids_of(tokenizer, "xaxax"), stop=("x",), min_tokens=3)
    assert text == "xa"
    assert last.stop_reason == "x"


def test_include_stop_keeps_the_match(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one. two")
    assert play(tokenizer, ids, stop=(".",), include_stop=True)[0] == "one."


def test_the_earliest_then_longest_stop_wins(tokenizer: Tokenizer) -> None:
    vocab = {"ab": 0, "cde": 1}
    wide = Tokenizer(models.WordLevel(vocab, unk_token="ab"))
    wide.decoder = decoders.Fuse()
    text, _, last = play(wide, [0, 1], stop=("de", "cd", "cde"))
    assert (text, last.stop_reason) == ("ab", "cde")


def test_bytes_of_tokens(tokenizer: Tokenizer) -> None:
    table = token_bytes_table(tokenizer)
    wanted = "caf\u00e9 \u20ac\n"
    assert b"".join(table[i] for i in ids_of(tokenizer, wanted)) == wanted.encode()
    assert table[EOS] == b"<end>"


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """Llama 2's kind: bytes for what the vocabulary does not spell, spaces as U+2581."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a", "b"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_a_broken_character_after_a_byte_that_was_shown(fallback: Tokenizer) -> None:
    """`\n` is a byte there; half an emoji after it changes how the decoder reads both."""
    ids = [1 + byte for byte in (0x0A, 0xF0, 0x9F)]
    text, deltas, last = play(fallback, [*ids, 257, 258], max_tokens=5)
    assert deltas[0] == "\n"
    assert text == "\n\ufffd\ufffd ab"
    assert last.finish_reason == "length"
    text, _, _ = play(fallback, ids, max_tokens=3)
    assert text == "\n\ufffd\ufffd"


@given(st.lists(st.integers(0, 258), min_size=1, max_size=40))
def test_no_ids_are_beyond_the_decoder(fallback: Tokenizer, ids: list[int]) -> None:
    _, _, last = play(fallback, ids, max_tokens=len(ids), ignore_eos=True)
    assert last.finish_reason == "length"
