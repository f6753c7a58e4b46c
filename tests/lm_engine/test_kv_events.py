"""A real engine's events, with device, host and disk, against what a router computes by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kv_offload.disk_key import chain_key, root_key
from kv_offload.superblock import SUPERBLOCK_TOKENS
from lm_engine.engine import Engine
from tests.kv_offload.test_kv_events import Held, apply, router_chain, router_root
from tests.lm_engine.harness import (
    Lab,
    Prompt,
    evict_prefixes,
    greedy,
    picture,
    run,
    run_one,
)

GetLab = Callable[[str], Lab]
BLOCK = 4


def ids(count: int, seed: int = 0) -> Prompt:
    rng = random.Random(seed)
    return Prompt(tuple(rng.randrange(5, 60) for _ in range(count)))


def told(lab: Lab, **options: Any) -> Engine:
    """800 tokens on the device, 1,536 on the host."""
    return lab.engine(
        budget=64,
        block_size=BLOCK,
        blocks=200,
        host_tokens=6 * SUPERBLOCK_TOKENS,
        max_model_len=1024,
        kv_events=True,
        **options,
    )


def paths(root: Any, children: Callable[[Any], Sequence[Any]]) -> Iterator[tuple[Any, list[int]]]:
    """Every node below a root with the ids up to its end."""
    todo: list[tuple[Any, list[int]]] = [(child, list(child.ids)) for child in children(root)]
    while todo:
        node, so_far = todo.pop()
        yield node, so_far
        todo += [(child, [*so_far, *child.ids]) for child in children(node)]


def row(engine: Engine, tier: str, tenant: str, token_ids: Sequence[int], size: int) -> Any:
    root = router_root(engine.info.name, tenant)
    chain = router_chain(root, [f"{one:x}" for one in token_ids], size)
    return (tier, tenant, *chain[-1])


def truth(engine: Engine, prompts: Sequence[Prompt]) -> Held:
    """What the trees hold; of the disk, what `prompts` may have left there."""
    kv, found = engine.scheduler.kv, set()
    for key, root in kv.cache._roots.items():
        for _, path in paths(root, lambda node: node.children):
            found.add(row(engine, "device", key.tenant, path, BLOCK))
    assert kv.cold is not None
    host = kv.cold.cache
    for key, below in host._roots.items():
        for node, path in paths(below, lambda node: list(node.children.values())):
            if host.holds(node):
                found.add(row(engine, "host", key.tenant, path, SUPERBLOCK_TOKENS))
    disk = None if kv.tiers is None else kv.tiers.transfers.disk
    if disk is not None:
        for prompt in prompts:
            name = root_key(engine.scheduler._prefixes.key)
            for end in range(SUPERBLOCK_TOKENS, len(prompt) + 1, SUPERBLOCK_TOKENS):
                name = chain_key(name, prompt.token_ids[end - SUPERBLOCK_TOKENS : end])
                if name in disk:
                    part = prompt.token_ids[:end]
                    found.add(row(engine, "disk", "", part, SUPERBLOCK_TOKENS))
    return found


def test_a_reader_holds_what_the_tiers_hold_after_every_step(lab: GetLab, tmp_path: Path) -> None:
    tiny = lab("llama")
    prompts = [ids(600, seed) for seed in range(4)]
    held: Held = set()
    seen: set[tuple[str, str]] = set()
    for process in range(2):
        engine = told(tiny, disk=tmp_path)
        held.clear()
        apply(held, engine.take_kv_events())
        assert held == truth(engine, prompts)
        assert {one[0] for one in held} == ({"disk"} if process else set())

        def listen(step: int, engine: Engine = engine) -> None:
            events = engine.take_kv_events()
            apply(held, events)
            seen.update((event.kind, event.tier) for event in events)
            if step % 5 == 0:
                assert {o for o in held if o[0] != "disk"} == {
                    o for o in truth(engine, ()) if o[0] != "disk"
                }

        for prompt in (*prompts, prompts[0], prompts[3]):
            run_one(engine, prompt, greedy(3), before_step=listen)
            listen(0)
            assert held == truth(engine, prompts)
            evict_prefixes(engine)
        run(engine, [prompts[1].request("other", greedy(2), tenant="other")], before_step=listen)
        listen(0)
        engine.reset_prefix_cache("other")
        listen(0)
        assert {one[1] for one in held} == {""}
        assert held == truth(engine, prompts)
        engine.close()
    want = {(kind, tier) for kind in ("stored", "evicted") for tier in ("device", "host")}
    assert seen >= {*want, ("stored", "disk"), *(("cleared", t) for t in ("device", "host"))}


def test_a_reset_is_told_on_every_tier(lab: GetLab, tmp_path: Path) -> None:
    engine = told(lab("llama"), disk=tmp_path)
    prompt, held = ids(600), set[Any]()
    run_one(engine, prompt, greedy(2))
    apply(held, engine.take_kv_events())
    assert {one[0] for one in held} == {"device", "host", "disk"}
    engine.reset_prefix_cache("")
    apply(held, engine.take_kv_events())
    assert held == set()
    engine.close()
    engine = told(lab("llama"), disk=tmp_path)
    assert engine.take_kv_events() == ()
    engine.close()


def test_answers_do_not_depend_on_listening_and_silence_costs_no_names(lab: GetLab) -> None:
    prompt = ids(300)
    loud = told(lab("llama"))
    quiet = lab("llama").engine(budget=64, block_size=BLOCK, blocks=200, max_model_len=800)
    want = run_one(loud, prompt, greedy(5))
    assert run_one(quiet, prompt, greedy(5)).tokens() == want.tokens()
    assert len(loud.take_kv_events()) >= 300 // BLOCK
    assert quiet.take_kv_events() == ()
    assert all(node.name is None for node in quiet.scheduler.kv.cache._nodes.values())


def test_an_image_is_named_by_its_key(lab: GetLab) -> None:
    tiny = lab("qwen2_5_vl")
    prompt = tiny.prompt("a thing ", picture(112, 84), " in the rain, and another one")
    engine = told(tiny)
    run_one(engine, prompt, greedy(2))
    held: Held = set()
    apply(held, engine.take_kv_events())
    texts = [f"{one:x}" for one in prompt.token_ids]
    for span in prompt.spans:
        for at in range(span.length):
            texts[span.offset + at] = f"1{span.key.hex()}{span.row_offset + at:08x}"
    whole = len(texts) // BLOCK * BLOCK
    root = router_root(engine.info.name, "")
    keys = {one[2] for one in held if one[0] == "device"}
    assert keys >= {key for key, _, _ in router_chain(root, texts[:whole], BLOCK)}
    assert prompt.spans[0].length > BLOCK
