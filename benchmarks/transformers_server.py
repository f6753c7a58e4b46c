"""transformers behind the same HTTP route as the servers it is compared with.

Owns: a bare /v1/completions over `generate` (one request at a time) or over transformers'
continuous batching. Does not own: anything that is measured elsewhere.

python -m benchmarks.transformers_server MODEL PORT {generate,continuous} THREADS
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer


class _Tokens(BaseStreamer):  # type: ignore[misc]
    """Hands each generated token to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[int | None]) -> None:
        self.loop, self.queue, self.prompt = loop, queue, True

    def put(self, value: Any) -> None:
        if self.prompt:
            self.prompt = False
            return
        self.loop.call_soon_threadsafe(self.queue.put_nowait, int(value.reshape(-1)[-1]))

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.queue.put_nowait, None)


def create(folder: str, mode: str) -> FastAPI:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    app, lock = FastAPI(), threading.Lock()
    manager: Any = None
    if mode == "continuous":
        config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=64)
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()

    async def generated(body: dict[str, Any]) -> AsyncIterator[int]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[int | None]()

        def run() -> None:
            with lock, torch.inference_mode():
                model.generate(
                    torch.tensor([body["prompt"]]),
                    max_new_tokens=body["max_tokens"],
                    min_new_tokens=body["max_tokens"],
                    do_sample=False,
                    streamer=_Tokens(loop, queue),
                )

        threading.Thread(target=run, daemon=True).start()
        while (token := await queue.get()) is not None:
            yield token

    waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[list[int]]]] = {}

    def hand_out() -> None:
        """One reader for all requests: each result belongs to whoever asked for it."""
        while True:
            result = manager.get_result(timeout=1.0)
            if result is not None and result.request_id in waiting:
                loop, queue = waiting[result.request_id]
                loop.call_soon_threadsafe(queue.put_nowait, list(result.generated_tokens))

    if manager is not None:
        threading.Thread(target=hand_out, daemon=True).start()
    names = itertools.count()

    async def batched(body: dict[str, Any]) -> AsyncIterator[int]:
        name, queue = f"r{next(names)}", asyncio.Queue[list[int]]()
        waiting[name] = (asyncio.get_running_loop(), queue)
        try:
            manager.add_request(
                body["prompt"], request_id=name, max_new_tokens=body["max_tokens"], streaming=True
            )
            seen = 0
            while seen < body["max_tokens"]:
                tokens = await asyncio.wait_for(queue.get(), 120)
                for token in tokens[seen:]:
                    seen += 1
                    yield int(token)
        finally:
            del waiting[name]

    source = batched if mode == "continuous" else generated

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            async for token in source(body):
                event = {"choices": [{"text": f"{token} ", "finish_reason": None}]}
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    uvicorn.run(create(sys.argv[1], sys.argv[3]), port=int(sys.argv[2]), log_level="warning")
