"""Traces: three formats, faults with their place, and what is made of them."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from chunked_prefill.trace import TraceError, TraceRequest, read_trace, write_trace
from chunked_prefill.workload import (
    Changes,
    WorkloadError,
    changed,
    parse_workload,
    scaled,
    synthesize,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = """{"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 30500, "input_length": 512, "output_length": 1, "hash_ids": [0]}

{"timestamp": 30500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 9]}
"""


def _file(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -- formats ------------------------------------------------------------------------------------


def test_azure_rows_are_requests_from_second_zero(tmp_path: Path) -> None:
    requests = list(read_trace(_file(tmp_path, AZURE)))
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-5)


def test_azure_times_may_have_a_zone_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = AZURE.replace(".9951690,", ".995169+00:00,").replace("\n", "\r\n")
    requests = list(read_trace(_file(tmp_path, b"\xef\xbb\xbf" + text.encode())))
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-5)


def test_mooncake_ids_say_which_prompts_begin_alike(tmp_path: Path) -> None:
    requests = list(read_trace(_file(tmp_path, MOONCAKE)))
    assert [r.arrival_s for r in requests] == [0.0, 3.5, 3.5]
    ids = [r.prompt_ids(number) for number, r in enumerate(requests)]
    assert [len(i) for i in ids] == [1100, 512, 1024]
    assert ids[0][:512] == ids[1] == ids[2][:512]
    assert ids[0][512] != ids[2][512]
    # Three blocks of ids of which the last is not full: what lies beyond is nobody else's.
    assert len(set(ids[0])) == 1100


def test_own_format_comes_back_as_it_was_written(tmp_path: Path) -> None:
    requests = [
        TraceRequest(0.0, 100, 5),
        TraceRequest(0.25, 64, 1, images=((448, 448), (1920, 1080)), tenant="a", priority=-1),
        TraceRequest(0.5, 90, 3, hash_ids=(4, 5), block_tokens=32),
        TraceRequest(0.5, 3, 2, token_ids=(7, 8, 9)),
    ]
    path = tmp_path / "own.jsonl"
    assert write_trace(path, requests) == 4
    assert list(read_trace(path)) == requests


def test_own_tokens_are_nobody_elses() -> None:
    request = TraceRequest(0.0, 100, 5, hash_ids=(4, 5), block_tokens=32)
    first, second = request.prompt_ids(0), request.prompt_ids(1)
    assert first[:64] == second[:64] == tuple(range(128, 192))
    assert not set(first[64:]) & set(second[64:])
    assert len(set(first)) == 100


def test_a_file_is_read_no_further_than_it_is_needed(tmp_path: Path) -> None:
    path = _file(tmp_path, AZURE + "and then nonsense\n")
    first = itertools.islice(read_trace(path), 3)
    assert len(list(first)) == 3
    kept = list(changed(read_trace(path), Changes(duration_s=4.4)))
    assert len(kept) == 2


# -- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "no requests"),
        ("\n\n", 3, "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", 2, "no requests"),
        ("when,in,out\n", 1, "the header is 'when,in,out'"),
        (AZURE + "2023-11-16 18:15:52,12\n", 5, "2 fields, expected 3"),
        (AZURE + "yesterday,12,3\n", 5, "TIMESTAMP is 'yesterday'"),
        (AZURE + "2023-11-16 18:15:52,many,3\n", 5, "ContextTokens is 'many'"),
        (AZURE + "2023-11-16 18:15:52,12,0\n", 5, "GeneratedTokens is 0, expected at least 1"),
        (AZURE + "2023-11-16 18:15:52,-5,1\n", 5, "ContextTokens is -5"),
        (AZURE + "2023-11-16 18:15:52,99999999999,1\n", 5, "less than 16777216"),
        (AZURE + "2023-11-16 18:15:46,12,3\n", 5, "before the line before it; sort"),
        (AZURE + "2023-11-16 18:15:52,1_000,3\n", 5, "ContextTokens is '1_000'"),
        (AZURE + "2023-11-16 18:15:52,12,NaN\n", 5, "GeneratedTokens is 'NaN'"),
        (AZURE + "2023-11-16 18:15:52,12,\n", 5, "GeneratedTokens is '', expected a whole"),
        (AZURE + "2023-11-16 18:15:52,1,2,3\n", 5, "4 fields, expected 3"),
        (AZURE + ",12,3\n", 5, "TIMESTAMP is ''"),
        (AZURE.replace("\n", "\r"), 1, "the header is "),
        ("\ufeff", 2, "no requests"),
        ("\ufeff" + AZURE.replace(",44", ",-44"), 2, "GeneratedTokens is -44"),
        ("\ufeff" + MOONCAKE.replace("52", "0"), 1, "output_length is 0, expected at least 1"),
        (MOONCAKE.replace("\n", "\r\n") + "{}\r\n", 5, "timestamp is missing"),
        (MOONCAKE.replace("27000", "30501"), 2, "0.001 s before the line before it; sort"),
        (MOONCAKE.replace("27000", "1" + "0" * 400), 1, "expected a number up to 1e+15"),
        (MOONCAKE.replace("27000", "1" + "0" * 5000), 1, "JSON that nobody reads: Exceeds"),
        (MOONCAKE + "[" * 100_000, 5, "JSON that nobody reads: maximum recursion"),
        (MOONCAKE.replace("27000", "-Infinity"), 1, "timestamp is -inf"),
        (MOONCAKE.replace("[0, 9]", "9"), 4, "hash_ids is 9, expected a list"),
        ('{"timestamp": 1, "input_length": 5}\n', 1, "output_length is missing"),
        (MOONCAKE + "{]\n", 5, "not JSON"),
        (MOONCAKE + "7\n", 5, "it is 7, expected a JSON object"),
        (MOONCAKE.replace("[0, 9]", "[0]"), 4, "1 ids, but 1024 tokens are 2 blocks of 512"),
        (MOONCAKE.replace("[0, 9]", "[0, -9]"), 4, "hash_ids is [0, -9]"),
        (MOONCAKE.replace("27000", "NaN"), 1, "timestamp is nan, expected a number"),
        (MOONCAKE.replace("27000", "true"), 1, "timestamp is True, expected a number"),
        (MOONCAKE.replace("27000", "-1"), 1, "timestamp is -1, expected 0 or more"),
        ('{"arrival_s": 0, "output_tokens": 1}\n', 1, "prompt_tokens is missing"),
        ('{"arrival_s": 0, "prompt_tokens": 2.5, "output_tokens": 1}\n', 1, "prompt_tokens is 2.5"),
        (
            '{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 1, "token_ids": [1]}\n',
            1,
            "prompt_tokens is 2, but there are 1 token_ids",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 1, "imgs": []}\n',
            1,
            "'imgs' is not known",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 1, "images": [[3, 0]]}\n',
            1,
            "images has [3, 0], expected [width, height]",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 1, "images": [[9, 2000000]]}\n',
            1,
            "images has [9, 2000000], expected [width, height]",
        ),
        (
            '{"arrival_s": 5, "prompt_tokens": 2, "output_tokens": 1}\n'
            '{"arrival_s": 4.5, "prompt_tokens": 2, "output_tokens": 1}\n',
            2,
            "it arrives 0.5 s before the line before it",
        ),
        (
            '{"arrival_s": NaN, "prompt_tokens": 2, "output_tokens": 1}\n',
            1,
            "arrival_s is nan",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 1, "tenant": 3}\n',
            1,
            "tenant is 3",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 1, "priority": "x"}\n',
            1,
            "priority is 'x'",
        ),
    ],
)
def test_a_fault_names_file_line_and_what_is_wrong(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert says in str(caught.value)
    assert caught.value.line == line


def test_bytes_that_are_no_text_are_a_fault(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 5: it is not UTF-8"):
        list(read_trace(_file(tmp_path, AZURE.encode() + b"\xff\xfe\n")))


def test_random_damage_is_a_fault_or_a_trace_and_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(5)
    faults = 0
    for base in (AZURE.encode(), MOONCAKE.encode()):
        for _ in range(300):
            text = bytearray(base)
            for _ in range(rng.randint(1, 4)):
                text[rng.randrange(len(text))] = rng.randrange(256)
            try:
                list(read_trace(_file(tmp_path, bytes(text))))
            except TraceError:
                faults += 1
    assert faults > 100


# -- changes ------------------------------------------------------------------------------------


def _steady(count: int, gap_s: float = 0.5) -> list[TraceRequest]:
    return [
        TraceRequest(i * gap_s, 160 + i, 32, hash_ids=(1, i), block_tokens=64) for i in range(count)
    ]


def test_an_excerpt_begins_at_zero_and_lasts_as_long_as_asked() -> None:
    kept = list(changed(_steady(100), Changes(start_s=10, duration_s=5)))
    assert [r.prompt_tokens for r in kept] == [160 + i for i in range(20, 30)]
    assert kept[0].arrival_s == 0.0
    assert kept[-1].arrival_s == 4.5


def test_speed_brings_the_same_requests_sooner() -> None:
    kept = list(changed(_steady(100), Changes(speed=2.0, duration_s=5)))
    assert [r.arrival_s for r in kept] == pytest.approx([i * 0.25 for i in range(20)])


def test_lengths_scale_together_with_what_is_shared() -> None:
    request = scaled(TraceRequest(0.0, 1600, 8, hash_ids=(1, 2, 3, 4), block_tokens=512), 1 / 16)
    assert (request.prompt_tokens, request.output_tokens, request.block_tokens) == (100, 1, 32)
    assert scaled(TraceRequest(0.0, 3, 2, token_ids=(7, 8, 9)), 0.5).token_ids == (7, 8)
    assert scaled(TraceRequest(0.0, 3, 2, token_ids=(7, 8, 9)), 2.0).token_ids == ()
    assert scaled(TraceRequest(0.0, 1, 1), 0.001).prompt_tokens == 1


def test_poisson_arrivals_keep_the_requests_and_follow_the_seed() -> None:
    requests = _steady(4000)
    changes = Changes(poisson_rate=8.0, seed=3)
    first, second = list(changed(requests, changes)), list(changed(requests, changes))
    assert first == second
    assert [r.prompt_tokens for r in first] == [r.prompt_tokens for r in requests]
    assert first != list(changed(requests, Changes(poisson_rate=8.0, seed=4)))
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(first)]
    mean = sum(gaps) / len(gaps)
    # Of an exponential, mean and deviation are equal; over 4,000 both lie within 5 %.
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.08)


def test_long_prompts_are_the_same_ones_at_any_rate() -> None:
    def long_ones(rate: float) -> list[int]:
        changes = Changes(poisson_rate=rate, long_share=0.05, long_tokens=(2048, 4096))
        kept = list(changed(_steady(1000, 0.01), changes))
        return [i for i, r in enumerate(kept) if 2048 <= r.prompt_tokens <= 4096]

    slow, fast = long_ones(1.0), long_ones(20.0)
    assert slow == fast
    assert 25 <= len(slow) <= 80


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lengths": 0.0}, "lengths is 0, expected above 0"),
        ({"duration_s": -1.0}, "duration_s is -1"),
        ({"poisson_rate": float("nan")}, "poisson_rate is nan"),
        ({"start_s": -2.0}, "start_s is -2, expected at least 0"),
        ({"long_share": 1.5}, "long_share is 1.5, expected 0 to 1"),
        ({"long_tokens": (5, 4)}, "long_tokens is (5, 4)"),
    ],
)
def test_impossible_changes_are_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Changes(**values)  # type: ignore[arg-type]
    assert says in str(caught.value)


# -- workloads ----------------------------------------------------------------------------------


def test_a_workload_has_the_rate_and_the_lengths_that_it_says() -> None:
    spec = "chat:rate=4,input=1155,output=211,long=0.01x2048-4096,duration=2000"
    requests = list(synthesize(spec, seed=1))
    assert requests == list(synthesize(spec, seed=1))
    assert requests != list(synthesize(spec, seed=2))
    assert len(requests) == pytest.approx(8000, rel=0.05)
    assert sum(r.output_tokens for r in requests) / len(requests) == pytest.approx(211, rel=0.05)
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(requests))
    assert requests[-1].arrival_s < 2000


def test_the_rate_does_not_change_the_requests() -> None:
    slow = list(synthesize("chat:rate=1,duration=100", seed=1))
    fast = list(synthesize("chat:rate=10,duration=10", seed=1))
    assert [r.prompt_tokens for r in slow] == [r.prompt_tokens for r in fast]


def test_ranges_images_and_shared_beginnings() -> None:
    spec = "images:rate=50,input=10-20,images=0.5x2-3,size=64x32|448x448,shared=100x4,tenant=t"
    requests = list(synthesize(spec))
    with_images = [r for r in requests if r.images]
    assert len(with_images) == pytest.approx(len(requests) / 2, rel=0.1)
    assert {len(r.images) for r in with_images} == {2, 3}
    assert {size for r in with_images for size in r.images} == {(64, 32), (448, 448)}
    assert all(110 <= r.prompt_tokens <= 120 and r.tenant == "t" for r in requests)
    beginnings = {r.prompt_ids(i)[:100] for i, r in enumerate(requests)}
    assert len(beginnings) == 4


def test_phases_follow_each_other_and_streams_run_together() -> None:
    requests = list(
        synthesize("chat:rate=5,duration=20;chat:rate=10,duration=20+documents:rate=5,duration=40")
    )
    early = [r for r in requests if r.arrival_s < 20]
    middle = [r for r in requests if 20 <= r.arrival_s < 40]
    late = [r for r in requests if r.arrival_s >= 40]
    assert len(early) < len(middle)
    assert all(r.prompt_tokens >= 8000 for r in late)
    assert late[-1].arrival_s < 60


def test_spread_zero_is_one_length() -> None:
    assert {r.prompt_tokens for r in synthesize("chat:input=77,spread=0")} == {77}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("talk:rate=1", "kind 'talk' is not known; choose chat, documents, images"),
        ("", "kind ''"),
        ("chat:rate", "'rate' is not key=value"),
        ("chat:speed=1", "'speed=1' is not key=value with one of rate, "),
        ("chat:rate=0", "rate is '0', expected requests a second above 0"),
        ("chat:rate=inf", "rate is 'inf'"),
        ("chat:rate=1,rate=2", "rate is given twice"),
        ("chat:input=9-3", "input is '9-3', expected tokens, or least-most"),
        ("chat:input=0", "input is '0'"),
        ("chat:long=5", "long is '5', expected SHARExLEAST-MOST"),
        ("chat:long=2x5-6", "long is '2x5-6'"),
        ("chat:size=448", "size is '448', expected WIDTHxHEIGHT"),
        ("chat:shared=100", "shared is '100', expected TOKENSxGROUPS"),
        ("chat:priority=high", "priority is 'high', expected a whole number"),
        ("chat:spread=9", "spread is '9', expected a number between 0 and 3"),
        ("chat;", "kind ''"),
    ],
)
def test_a_wrong_workload_says_what_is_expected(spec: str, says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_workload(spec)
    assert says in str(caught.value)


def test_a_workload_can_be_kept_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    made = list(synthesize("chat:rate=2+images:rate=1,shared=64x2"))
    write_trace(path, made)
    kept = list(read_trace(path))
    first_s = made[0].arrival_s
    assert len(kept) == len(made)
    for ours, theirs in zip(made, kept, strict=True):
        assert theirs.arrival_s == pytest.approx(ours.arrival_s - first_s, abs=2e-6)
        assert (theirs.images, theirs.hash_ids) == (ours.images, ours.hash_ids)
    assert json.loads(path.read_text().splitlines()[0])["output_tokens"] == made[0].output_tokens
