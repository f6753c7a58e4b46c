"""Requests about pictures and an engine that answers them, as the server makes both."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from api.frontend import load_frontend
from api.prompt import PlannedImage, Turn
from chunked_prefill.request import Request, SamplingParams
from lm_engine.client import MediaItem
from lm_engine.engine import Engine
from lm_engine.offline import Prompt
from lm_engine.options import EngineOptions
from vision_encoder.media import content_key


def png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def prompts(
    folder: Path, asked: Sequence[tuple[bytes | None, str]], new_tokens: int
) -> list[Prompt]:
    """Greedy requests, each about the bytes of one picture or none, named by their place."""
    built = load_frontend(folder, tokenizer=None, template=None).prompts
    assert built.planner is not None
    made: list[Prompt] = []
    for i, (data, question) in enumerate(asked):
        items: tuple[MediaItem, ...] = ()
        if data is None:
            prompt = built.chat([Turn("user", (question,))], [])
        else:
            with Image.open(BytesIO(data)) as image:
                plan = built.planner.plan([image.size])[0]
            items = (MediaItem(content_key(data, plan.fingerprint, b"demo"), plan, str(i), data),)
            picture = PlannedImage(items[0].key, plan)
            prompt = built.chat([Turn("user", (0, question))], [picture])
        greedy = SamplingParams(new_tokens, temperature=0.0)
        request = Request(str(i), prompt.token_ids, greedy, image_spans=prompt.spans)
        made.append((request, items))
    return made


def engine(folder: Path, budget: int = 512, rows: int = 2048) -> Engine:
    """One thread, no prefix cache; `budget` tokens a step, room for `rows` image embeddings."""
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
