"""Engine.generate: answers in order, equal to online ones, and faults by type."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from chunked_prefill.request import SamplingParams
from lm_engine.engine import Engine
from lm_engine.offline import Prompt, RequestFailedError
from lm_engine.options import EngineOptions
from tests.lm_engine.harness import Lab, check_idle, evict_prefixes, greedy, picture, run_one

Labs = Callable[[str], Lab]


@pytest.fixture
def engine(lab: Labs) -> Engine:
    return lab("llava").engine(budget=16)


def test_answers_come_in_order_and_equal_online_ones(lab: Labs, engine: Engine) -> None:
    this = lab("llava")
    shown = this.prompt("see ", picture(48, 48, 1), "?")
    texts = ["ten cats", "a tin ring in the rain", "x"]
    params = [greedy(3 + i, logprobs=2) for i in range(5)]
    ids = this.encode("another")
    prompts: list[Prompt] = [*texts, ids, (shown.request("own", greedy(1)), shown.media)]
    found = engine.generate(prompts, params)
    check_idle(engine)
    online = [this.prompt(text) for text in (*texts, "another")] + [shown]
    for completion, prompt, sampling in zip(found, online, params, strict=True):
        evict_prefixes(engine)
        want = run_one(engine, prompt, sampling)
        assert completion.text == want.text()
        assert list(completion.token_ids) == want.tokens()
        assert completion.prompt_token_ids == prompt.token_ids
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        assert [e.token_id for e in completion.logprobs] == want.tokens()
        assert all(len(e.top) == 2 for e in completion.logprobs)
        # Prompts that are answered together may begin alike.
        assert replace(completion.usage, cached_tokens=0) == want.usage
        assert completion.prompt_logprobs is None
    assert found[-1].request_id == "own"


def test_a_request_keeps_its_own_sampling(lab: Labs, engine: Engine) -> None:
    request = lab("llava").prompt("ten").request("own", greedy(4))
    (completion,) = engine.generate([(request, ())])
    assert len(completion.token_ids) == 4


def test_choices_and_prompt_logprobs(engine: Engine) -> None:
    sampling = SamplingParams(5, seed=1, n=3, ignore_eos=True, prompt_logprobs=1)
    (completion,) = engine.generate(["ten tin cats"], sampling)
    assert len(completion.choices) == 3
    assert len({choice.token_ids for choice in completion.choices}) == 3
    assert completion.usage.completion_tokens == 15
    assert completion.logprobs is None
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(completion.prompt_token_ids)


def test_nothing_is_computed_when_one_prompt_is_refused(engine: Engine) -> None:
    steps = engine.scheduler.step
    with pytest.raises(RequestFailedError, match="prompt 1") as caught:
        engine.generate(["fine", [99999]], greedy(4))
    assert caught.value.index == 1
    assert caught.value.error.kind == "invalid"
    assert engine.scheduler.step == steps
    check_idle(engine)


def test_a_fault_on_the_way_frees_the_others(lab: Labs, engine: Engine) -> None:
    shown = lab("llava").prompt("see ", picture(48, 48, 1), "?")
    (item,) = shown.media
    assert item.data is not None
    broken = replace(item, data=item.data[:-30])
    with pytest.raises(RequestFailedError, match=r"prompt 1 \(messages.0.content.0\)"):
        engine.generate(["a long one", (shown.request("bad", greedy(2)), (broken,))], greedy(50))
    check_idle(engine)


def test_arguments_that_do_not_fit(lab: Labs, engine: Engine) -> None:
    with pytest.raises(TypeError, match="single string"):
        engine.generate("ten", greedy(1))
    with pytest.raises(ValueError, match="2 prompts but 1"):
        engine.generate(["a", "b"], [greedy(1)])
    with pytest.raises(ValueError, match="prompt 0 needs"):
        engine.generate(["a"])
    request = lab("llava").prompt("ten").request("own", greedy(4))
    with pytest.raises(ValueError, match="request_id"):
        engine.generate([(request, ()), (request, ())])
    check_idle(engine)
    engine.add(request)
    with pytest.raises(RuntimeError, match="idle"):
        engine.generate(["a"], greedy(1))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(_Terminal(), True), (io.StringIO(), False)])
def test_the_bar_is_for_terminals(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    engine.generate(["ten", "cats"], greedy(2), progress=True)
    assert ("2/2" in stream.getvalue()) == shown
    assert ("tokens/s" in stream.getvalue()) == shown


def test_options_reach_an_engine_used_directly(lab: Labs, tmp_path: Path) -> None:
    """The tokenizer of another folder decides texts, and the thread count is set."""
    folder = lab("llava").folder
    other = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.add_tokens(["<added>"])
    other.save(str(tmp_path / "tokenizer.json"))
    before = torch.get_num_threads()
    try:
        engine = Engine.load(
            EngineOptions(
                str(folder),
                tokenizer=str(tmp_path),
                device="cpu",
                threads=before + 1,
                kv_memory_bytes=1 << 20,
            )
        )
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert engine.tokenizer.token_to_id("<added>") is not None
