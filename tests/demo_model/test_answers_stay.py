"""The demo's right answers stay right however the prompt is cut and wherever its rows come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from api.frontend import load_frontend
from api.prompt import PlannedImage, Turn
from chunked_prefill.request import Request, SamplingParams
from demo_model.assemble import DemoUnavailable, assemble
from lm_engine.client import MediaItem
from lm_engine.engine import Engine
from lm_engine.offline import Prompt
from lm_engine.options import EngineOptions
from vision_encoder.media import content_key

PICTURES = sorted((Path(__file__).parents[1] / "data" / "numbers").iterdir())
QUESTION = "What number is written in the image?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return assemble(tmp_path_factory.mktemp("demo"))
    except DemoUnavailable as error:
        pytest.skip(str(error))


def _prompts(folder: Path) -> list[Prompt]:
    prompts = load_frontend(folder, tokenizer=None, template=None).prompts
    assert prompts.planner is not None
    made: list[Prompt] = []
    for path in PICTURES:
        name, data = path.name, path.read_bytes()
        with Image.open(path) as image:
            plan = prompts.planner.plan([image.size])[0]
        item = MediaItem(content_key(data, plan.fingerprint, b"demo"), plan, name, data)
        prompt = prompts.chat([Turn("user", (0, QUESTION))], [PlannedImage(item.key, plan)])
        request = Request(
            name,
            prompt.token_ids,
            SamplingParams(32, temperature=0.0),
            image_spans=prompt.spans,
        )
        made.append((request, (item,)))
    return made


def _engine(folder: Path, budget: int, rows: int) -> Engine:
    return Engine.load(
        EngineOptions(
            str(folder),
            device="cpu",
            threads=1,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            prefix_caching=False,
            kv_memory_bytes=256 * 2**20,
            embedding_rows=rows,
        )
    )


@pytest.mark.slow
def test_right_answers_stay_right_in_any_chunks_and_with_rows_cached_or_encoded_again(
    folder: Path,
) -> None:
    prompts = _prompts(folder)
    assert len(prompts) >= 20
    engine = _engine(folder, 512, 64 * len(prompts))
    first = [answer.text for answer in engine.generate(prompts)]
    right = [path.stem in said for said, path in zip(first, PICTURES, strict=True)]
    assert sum(right) >= 15, [a for a, r in zip(first, right, strict=True) if not r]
    encoded = engine.stats().images_encoded
    cached = [answer.text for answer in engine.generate(prompts)]
    assert engine.stats().images_encoded == encoded, "every image's rows were still there"
    assert cached == first
    for budget in (7, 33, 100):
        # Room for one image: each evicts the one before, and the second round encodes all again.
        engine = _engine(folder, budget, 64)
        for _ in range(2 if budget == 100 else 1):
            assert [answer.text for answer in engine.generate(prompts)] == first, budget
    assert engine.stats().images_encoded == 2 * len(prompts)
