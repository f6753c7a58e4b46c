"""Evidence by attention: the masses are transformers' own, however they are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chunked_prefill.request import EvidenceParams, SamplingParams
from lm_engine.attention.base import AttentionBackend
from lm_engine.attention.cpu import CpuAttention
from lm_engine.attention.reference import ReferenceAttention
from lm_engine.engine import Engine
from lm_engine.evidence import Recorder, default_layers
from lm_engine.options import EngineOptions
from lm_engine.outputs import Evidence, RequestOutput, SequenceDelta
from lm_engine.process.messages import Submission
from lm_engine.process.wire import Codec
from tests.checkpoints import hf_model
from tests.lm_engine.harness import (
    TEXT,
    Lab,
    Prompt,
    Result,
    evict_prefixes,
    greedy,
    picture,
    preempt,
    run,
    run_one,
)
from tests.lm_engine.test_large_contexts import CHUNK, DEVICE_TOKENS, ids, resident, small_device

GetLab = Callable[[str], Lab]
TOLERANCE = 1e-4
"""Against transformers, which has other kernels."""
SAME = 1e-6
"""Between two ways of computing the same here."""
NEW = 10


def asking(tokens: int = NEW, /, *, n: int = 1, **evidence: Any) -> SamplingParams:
    params = greedy(tokens, n=n, evidence=EvidenceParams(**({"interval": 16} | evidence)))
    return replace(params, temperature=1.0, seed=5) if n > 1 else params


def evidence_of(result: Result, choice: int = 0) -> Evidence:
    found = [delta.evidence for delta in result.of(choice) if delta.evidence is not None]
    assert len(found) == 1
    assert result.of(choice)[-1].evidence is found[0]
    assert found[0].rows == len(result.tokens(choice))
    return found[0]


def vector(evidence: Evidence) -> np.ndarray:
    return np.array([evidence.sink_mass, evidence.answer_mass, *evidence.masses])


@functools.cache
def eager(lab: Lab) -> Any:
    return hf_model(lab.folder, "eager")


def oracle(lab: Lab, prompt: Prompt, answer: list[int], like: Evidence) -> np.ndarray:
    """The same masses from the probabilities that transformers gives, every key by itself."""
    inputs = dict(prompt.hf_inputs) or {"input_ids": torch.tensor([prompt.token_ids])}
    extra = torch.tensor([answer[:-1]], dtype=torch.int64)
    inputs["input_ids"] = torch.cat((inputs["input_ids"], extra), 1)
    if "attention_mask" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat((kinds, torch.zeros_like(extra)), 1)
    with torch.no_grad():
        layers = eager(lab)(**inputs, use_cache=False, output_attentions=True).attentions
    shares = torch.stack([layers[layer][0] for layer in like.layers]).double().mean((0, 1))
    rows = shares[len(prompt) - 1 :].mean(0)
    assert len(shares) == len(prompt) + len(answer) - 1
    sinks = like.sink_tokens
    starts = range(0, len(prompt), like.interval)
    parts = [rows[:sinks], rows[len(prompt) :]]
    parts += [rows[max(sinks, a) : max(sinks, min(a + like.interval, len(prompt)))] for a in starts]
    return np.array([float(part.sum()) for part in parts])


def assert_same(got: Evidence, want: Evidence, note: str = "") -> None:
    settings = [(e.layers, e.interval, e.sink_tokens, e.prompt_tokens, e.rows) for e in (got, want)]
    assert settings[0] == settings[1], note
    assert np.abs(vector(got) - vector(want)).max() <= SAME, note


# -- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(), (0,), (0, 1, 2)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2_window", "qwen3", "smollm3"])
def test_masses_are_transformers(lab: GetLab, family: str, layers: tuple[int, ...]) -> None:
    tiny = lab(family)
    prompt = tiny.prompt(TEXT * 3)
    result = run_one(tiny.engine(budget=50), prompt, asking(layers=layers))
    got = evidence_of(result)
    want = oracle(tiny, prompt, result.tokens(), got)
    assert np.abs(vector(got) - want).max() <= TOLERANCE
    assert vector(got).sum() == pytest.approx(1.0, abs=1e-5)
    assert len(got.masses) == -(-len(prompt) // 16)


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_masses_on_images_are_transformers(lab: GetLab, family: str) -> None:
    tiny = lab(family)
    prompt = tiny.prompt("see ", picture(150, 60), " and ", picture(64, 64, 1), " what is it?")
    result = run_one(tiny.engine(budget=20), prompt, asking(layers=(0, 2)))
    got = evidence_of(result)
    want = oracle(tiny, prompt, result.tokens(), got)
    assert np.abs(vector(got) - want).max() <= TOLERANCE
    shown = {at // 16 for span in prompt.spans for at in range(span.offset, span.end)}
    assert sum(got.masses[i] for i in shown) > 0.1


@pytest.mark.parametrize(("interval", "sinks"), [(16, 0), (17, 16), (64, 40), (500, 1000)])
def test_any_interval_and_any_sinks(lab: GetLab, interval: int, sinks: int) -> None:
    tiny = lab("llama")
    prompt = tiny.prompt(TEXT * 3)
    result = run_one(tiny.engine(), prompt, asking(interval=interval, sinks=sinks))
    got = evidence_of(result)
    assert np.abs(vector(got) - oracle(tiny, prompt, result.tokens(), got)).max() <= TOLERANCE
    if sinks == 1000:
        assert got.sink_tokens == len(prompt)
        assert got.masses == (0.0,)


def test_a_prompt_of_one_token(lab: GetLab) -> None:
    result = run_one(lab("llama").engine(), Prompt((9,)), asking(1, sinks=0))
    assert vector(evidence_of(result)) == pytest.approx([0, 0, 1], abs=1e-6)


def test_each_choice_has_its_own(lab: GetLab) -> None:
    tiny = lab("llama")
    prompt = tiny.prompt(TEXT * 2)
    result = run_one(tiny.engine(), prompt, asking(n=3))
    found = [evidence_of(result, choice) for choice in range(3)]
    assert len({tuple(result.tokens(choice)) for choice in range(3)}) == 3
    for choice, got in enumerate(found):
        want = oracle(tiny, prompt, result.tokens(choice), got)
        assert np.abs(vector(got) - want).max() <= TOLERANCE


# -- however it is computed -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_same_in_any_chunks_and_from_the_cache(lab: GetLab, family: str) -> None:
    tiny = lab(family)
    prompt = tiny.prompt(TEXT * 3)
    want = evidence_of(run_one(tiny.engine(), prompt, asking()))
    for budget, block in ((3, 4), (33, 16), (512, 32)):
        engine = tiny.engine(budget=budget, block_size=block)
        for state in ("cold", "warm", "evicted"):
            if state == "evicted":
                evict_prefixes(engine)
            result = run_one(engine, prompt, asking())
            assert result.usage is not None
            assert (result.usage.cached_tokens > 0) == (state == "warm")
            assert_same(evidence_of(result), want, f"{budget} {block} {state}")


def test_the_same_with_company(lab: GetLab) -> None:
    tiny = lab("llama")
    jobs = {f"{i}": (tiny.prompt(TEXT[i:] * 2), asking(4 + i, interval=16 + i)) for i in range(4)}
    jobs["silent"] = (tiny.prompt(TEXT), greedy(9))
    engine = tiny.engine(budget=40)
    want = {name: run_one(tiny.engine(), *job) for name, job in jobs.items()}
    got = run(engine, jobs, arrivals={"2": 3, "silent": 4, "3": 9})
    for name in "0123":
        assert_same(evidence_of(got[name]), evidence_of(want[name]), name)
    assert all(delta.evidence is None for delta in got["silent"].deltas)


@pytest.mark.parametrize("at", [2, 6, 9])
def test_the_same_after_a_preemption(lab: GetLab, at: int) -> None:
    tiny = lab("qwen3_vl")
    prompt = tiny.prompt("see ", picture(150, 60), TEXT)
    want = evidence_of(run_one(tiny.engine(), prompt, asking()))
    engine = tiny.engine(budget=60, caching=False)

    def disturb(step: int) -> None:
        if step == at:
            for sequence in engine.scheduler.running:
                preempt(engine, sequence)

    result = run_one(engine, prompt, asking(), before_step=disturb)
    assert engine.scheduler.num_preemptions == 1
    assert_same(evidence_of(result), want)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_same_where_the_beginning_lies_on_the_host(lab: GetLab, family: str) -> None:
    tiny = lab(family)
    prompt = ids(1500)
    sampling = asking(layers=(0, 1, 2), interval=64)
    want = evidence_of(run_one(resident(tiny), prompt, sampling))
    engine = small_device(tiny)
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        for sequence in engine.scheduler.running:
            most = max(most, len(engine.scheduler.kv.cold_slots(sequence.seq_id)))

    result = run_one(engine, prompt, sampling, before_step=watch)
    assert most >= (1500 - DEVICE_TOKENS - CHUNK) // 256
    assert_same(evidence_of(result), want)
    if family == "llama":
        assert min(want.masses) > 0
        assert np.abs(vector(want) - oracle(tiny, prompt, result.tokens(), want)).max() <= TOLERANCE


@pytest.mark.parametrize("backend", [ReferenceAttention(64), CpuAttention(128)])
def test_the_same_with_any_backend(lab: GetLab, backend: AttentionBackend) -> None:
    tiny = lab("qwen2_window")
    prompt = tiny.prompt(TEXT * 3)
    sampling = asking(layers=(0, 1, 2))
    want = evidence_of(run_one(tiny.engine(), prompt, sampling))
    engine = tiny.engine(budget=40)
    engine.runner.attention = backend
    got = evidence_of(run_one(engine, prompt, sampling))
    assert np.abs(vector(got) - vector(want)).max() <= 1e-5


def test_masses_add_up_in_bfloat16(lab: GetLab) -> None:
    options = EngineOptions(
        str(lab("llama").folder),
        dtype="bfloat16",
        device="cpu",
        max_model_len=512,
        kv_memory_bytes=1 << 22,
    )
    (completion,) = Engine.load(options).generate([TEXT * 3], asking(layers=(0, 1, 2)))
    evidence = completion.choices[0].evidence
    assert evidence is not None
    assert vector(evidence).sum() == pytest.approx(1, abs=2e-3)


# -- asked for, or not ----------------------------------------------------------------------------


def test_nothing_is_recorded_unless_asked(lab: GetLab, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = lab("llama")

    def never(*args: object, **how: object) -> None:
        raise AssertionError("recorded")

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "__init__", never)
        plain = run_one(tiny.engine(), tiny.prompt(TEXT), greedy(NEW))
    asked = run_one(tiny.engine(), tiny.prompt(TEXT), asking())
    assert asked.tokens() == plain.tokens()
    assert [e.logprob for e in asked.logprobs()] == [e.logprob for e in plain.logprobs()]


def test_the_default_layers_see_the_whole_context() -> None:
    assert default_layers((None,)) == (0,)
    assert default_layers((None,) * 3) == (1,)
    assert default_layers((None,) * 30) == tuple(range(10, 20))
    assert default_layers((8,) * 6) == (2, 3)
    assert default_layers((8, 8, 8, 8, 8, None) * 4) == (11,)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"layers": (3,)}, "return_evidence.layers"),
        ({"layers": (0, -1)}, "return_evidence.layers"),
        ({"interval": 15}, "return_evidence.interval"),
        ({"interval": 1 << 17}, "return_evidence.interval"),
        ({"sinks": -1}, "return_evidence.sinks"),
        ({"sinks": 1025}, "return_evidence.sinks"),
    ],
)
def test_what_does_not_exist_is_refused_first(
    lab: GetLab, asked: dict[str, Any], param: str
) -> None:
    engine: Engine = lab("llama").engine()
    request = lab("llama").prompt(TEXT).request("one", asking(**asked))
    (output,) = engine.add(request)
    assert output.error is not None
    assert (output.error.kind, output.error.param) == ("invalid", param)
    assert not engine.has_work()


def test_it_can_be_had_without_a_server(lab: GetLab) -> None:
    engine = lab("llama").engine()
    (completion,) = engine.generate([TEXT], asking())
    assert completion.choices[0].evidence is not None
    assert completion.choices[0].evidence.rows == NEW


def test_it_crosses_between_processes() -> None:
    codec = Codec()
    evidence = Evidence((1, 2), 64, 4, 130, 7, 0.25, 0.5, (0.125, 0.0625, 0.0625))
    output = RequestOutput("a", deltas=(SequenceDelta(0, "x", (1,), evidence=evidence),))
    assert codec.unpack(RequestOutput, codec.pack(output)) == output
    request = Prompt((1, 2)).request("a", asking(layers=(1,)))
    submission = Submission(request, ())
    assert codec.unpack(Submission, codec.pack(submission)) == submission
