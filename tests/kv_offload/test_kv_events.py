"""Who applies the prefix cache's events to a set holds what the tiers hold: names, files, restarts,
and everything together as a state machine.

The names are computed here a second time, as a router would from the documentation.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from kv_offload import disk_file
from kv_offload.disk_key import chain_key, root_key, tenant_mark
from kv_offload.disk_names import DiskNames
from kv_offload.disk_tier import DiskTier
from kv_offload.event_recorder import EventRecorder
from kv_offload.kv_events import BlockName, KVEvent, root_name
from kv_offload.radix_cache import CacheKey, image_id
from lm_engine.kv_log import KVEventLog, KVReader, KVSnapshot
from tests.chunked_prefill.test_tier_machine import TieredWorld
from tests.kv_offload.tiers import LAYOUT

MODEL = "some/model"
Held = set[tuple[str, str, bytes, bytes, int]]
"""Tier, tenant, key, parent, tokens."""


def router_root(model: str, tenant: str) -> bytes:
    model_part, tenant_part = (hashlib.sha256(s.encode()).digest() for s in (model, tenant))
    return hashlib.sha256(b"longlens-kv-1" + model_part + tenant_part).digest()


def router_chain(root: bytes, ids: Sequence[str], size: int) -> list[tuple[bytes, bytes, int]]:
    """Key, parent and tokens of each block of a prompt; ids in hexadecimal."""
    found, parent = [], root
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        key = hashlib.sha256(parent + ",".join(part).encode()).digest()
        found.append((key, parent, len(part)))
        parent = key
    return found


def apply(held: Held, events: Iterable[KVEvent]) -> None:
    """As a reader does; every change changes something."""
    for event in events:
        mine = {one for one in held if one[:2] == (event.tier, event.tenant)}
        if event.kind == "stored":
            row = (event.tier, event.tenant, event.key, event.parent, event.num_tokens)
            assert event.key not in {one[2] for one in mine}, "stored twice"
            held.add(row)
        elif event.kind == "evicted":
            gone = {one for one in mine if one[2] == event.key}
            assert len(gone) == 1, "evicted without having been stored"
            held -= gone
        else:
            held -= mine


# -- names ------------------------------------------------------------------------------------


def test_a_router_computes_the_same_names() -> None:
    key = bytes(range(200, 232))
    ids = [5, 70_000, image_id(key, 0), image_id(key, 300), 0]
    as_text = ["5", "11170", "1" + key.hex() + "00000000", "1" + key.hex() + "0000012c", "0"]
    name = root_name(MODEL, "acme")
    assert name == BlockName("acme", router_root(MODEL, "acme"))
    for start, (want, parent, tokens) in zip(
        (0, 2, 4), router_chain(name.key, as_text, 2), strict=True
    ):
        name = name.child(ids[start : start + 2])
        assert name == BlockName("acme", want, parent, tokens)


def test_names_differ_with_all_that_they_are_made_of() -> None:
    roots = {root_name(m, t, a).key for m in ("a", "ab") for t in ("b", "") for a in (b"", b"x")}
    assert len(roots) == 8
    root = root_name("m", "")
    assert root.child([1, 2]).child([3]).key != root.child([1]).child([2, 3]).key
    assert root.child([0x1, 0x2]).key != root.child([0x12]).key


# -- files ------------------------------------------------------------------------------------


class Slots:
    """HostBytes of one slot."""

    def __init__(self) -> None:
        self._bytes = bytearray(LAYOUT.num_bytes)

    def raw(self, slot: int) -> memoryview:
        return memoryview(self._bytes)

    def seal(self, slot: int) -> None: ...


class Files:
    """A disk tier for four superblocks of 16 tokens, and who listens; `restart` is a new process.

    Prompts are tuples of superblocks, each named by one number.
    """

    def __init__(self, folder: Path, model: str = MODEL, weights: bytes = b"w") -> None:
        self.folder, self.model = folder, model
        self.key = CacheKey(model=weights)
        bound = 4 * (disk_file.HEADER.size + LAYOUT.num_bytes)
        self.tier = DiskTier(folder, LAYOUT, Slots(), bound)
        self.recorder = EventRecorder(model)
        self.recorder.follow(self.tier, self.key)
        self.held: Held = set()
        self.read()

    def read(self) -> Held:
        apply(self.held, self.recorder.take())
        return self.held

    def restart(self, **changed: Any) -> Files:
        self.tier.close()
        return Files(self.folder, **({"model": self.model, "weights": self.key.model} | changed))

    def disk_key(self, tenant: str, path: Sequence[int]) -> bytes:
        key = root_key(CacheKey(tenant=tenant, model=self.key.model))
        for number in path:
            key = chain_key(key, (number,) * 16)
        return key

    def row(self, tenant: str, path: Sequence[int]) -> tuple[str, str, bytes, bytes, int]:
        ids = [f"{number:x}" for number in path for _ in range(16)]
        return ("disk", tenant, *router_chain(router_root(self.model, tenant), ids, 16)[-1])

    def name(self, tenant: str, path: Sequence[int]) -> None:
        """What the host's tree does when it asks for a file's name."""
        root = root_name(self.model, tenant)
        name = root
        for number in path:
            name = name.child((number,) * 16)
        disk_root = root_key(CacheKey(tenant=tenant, model=self.key.model))
        self.recorder.named(self.disk_key(tenant, path), disk_root, root, name)

    def save(self, tenant: str, path: Sequence[int], *, named: bool = True) -> None:
        if named:
            self.name(tenant, path)
        self.tier.save(0, self.disk_key(tenant, path)).run()

    def expected(self, paths: Iterable[tuple[str, tuple[int, ...]]]) -> Held:
        return {self.row(*one) for one in paths if self.disk_key(*one) in self.tier}


def test_files_are_told_and_found_again_by_the_next_process(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.save("a", (1,))
    files.save("a", (1, 2))
    files.save("b", (1,))
    want = {files.row("a", (1,)), files.row("a", (1, 2)), files.row("b", (1,))}
    assert files.read() == want
    assert files.restart().read() == want


def test_files_of_another_model_or_name_are_nobodys(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.save("a", (1,))
    want = {files.row("a", (1,))}
    files = files.restart(weights=b"others")
    assert files.read() == set()
    files = files.restart(weights=b"w", model="another name")
    assert files.read() == set()
    files = files.restart(model=MODEL)
    assert files.read() == want


def test_what_was_saved_without_names_is_told_once_it_is_read(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.save("a", (1,), named=False)
    assert files.read() == set()
    files.name("a", (1,))
    files.tier.fetch(files.disk_key("a", (1,)), 0).run()
    assert files.read() == {files.row("a", (1,))}


def test_a_spoilt_list_of_names_costs_only_what_was_spoilt(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.save("a", (1,))
    files.save("a", (2,))
    names = tmp_path / "names"
    assert names.stat().st_mode & 0o777 == 0o600
    lines = names.read_text().splitlines()
    names.write_bytes(
        b"[1, 2]\n\xff{}\nnull\n" + lines[0].encode() + b"\n" + lines[1][:50].encode()
    )
    files = files.restart()
    assert files.read() == {files.row("a", (1,))}
    assert len(names.read_text().splitlines()) == 1


def test_the_list_of_names_is_bounded(tmp_path: Path) -> None:
    names = DiskNames(tmp_path, 2, tuple)
    root = root_name(MODEL, "")
    for number in range(2000):
        key = number.to_bytes(40, "big")
        names.add(key, bytes(40), root, root.child((number,)))
        assert names.get(key) == root.child((number,)), "the newest is about to be written"
    assert len((tmp_path / "names").read_text().splitlines()) <= 4 * 66


def test_a_disk_that_takes_no_names_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = DiskNames(tmp_path / "gone", 2, tuple)
    names.add(bytes(40), bytes(40), root_name(MODEL, ""), root_name(MODEL, "").child((1,)))
    assert names.get(bytes(40)) is not None
    (tmp_path / "names").mkdir()
    assert DiskNames(tmp_path, 2, tuple).open(MODEL, CacheKey()) == []
    assert f"{tmp_path / 'names'} was not written: [Errno 21] Is a directory" in caplog.text
    assert "was not written" in caplog.text


@pytest.mark.parametrize("seed", range(8))
def test_files_in_any_order(tmp_path: Path, seed: int) -> None:
    """Saves, reads, evictions for room, files that rot or vanish, clears and restarts."""
    draw = random.Random(seed)
    paths = [(t, (*head, n)) for t in ("a", "b") for head in ((), (7,)) for n in range(4)]
    files = Files(tmp_path)
    for _ in range(200):
        tenant, path = draw.choice(paths)
        key = files.disk_key(tenant, path)
        kind = draw.choice(("save", "save", "save", "read", "rot", "clear", "restart"))
        if kind == "save":
            files.save(tenant, path)
        elif kind == "read" and key in files.tier:
            files.tier.fetch(key, 0).run()
        elif kind == "rot" and key in files.tier:
            disk_file.path_of(tmp_path, key).write_bytes(b"?")
            with pytest.raises(Exception, match="broken"):
                files.tier.fetch(key, 0).run()
        elif kind == "clear" and draw.random() < 0.4:
            files.tier.clear(draw.choice((b"", tenant_mark(tenant))))
        elif kind == "restart" and draw.random() < 0.4:
            files = files.restart()
        assert files.read() == files.expected(paths)


# -- everything together ----------------------------------------------------------------------


class ToldFiles(OrderedDict[bytes, Any]):
    """The machine's disk, which tells what a DiskTier would."""

    recorder: EventRecorder

    def __setitem__(self, key: bytes, content: Any) -> None:
        super().__setitem__(key, content)
        self.recorder.file_stored(key)

    def __delitem__(self, key: bytes) -> None:
        super().__delitem__(key)
        self.recorder.file_gone(key)

    def popitem(self, last: bool = True) -> tuple[bytes, Any]:
        key = next(reversed(self) if last else iter(self))
        content = self[key]
        del self[key]
        return key, content


class ToldWorld(TieredWorld):
    """Two readers per tenant beside the machine: one reads at once, the other when it likes."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        superblock=st.sampled_from([4, 8]),
        tokens=st.integers(48, 120),
        superblocks=st.integers(2, 30),
        files=st.sampled_from([0, 3, 12]),
        budget=st.sampled_from([1, 3, 8]),
        seats=st.integers(3, 8),
        seed=st.integers(0, 2**32),
    )
    def start(self, **drawn: int) -> None:  # type: ignore[override]
        super().start(**drawn)
        self.recorder = EventRecorder(MODEL)
        self.kv.cache._events = self.recorder
        assert self.kv.cold is not None
        self.kv.cold.cache._events = self.recorder
        self.folder = tempfile.TemporaryDirectory()
        there = ToldFiles()
        there.recorder = self.recorder
        self.places.on_disk = there
        self.recorder._names = DiskNames(Path(self.folder.name), 12, lambda: tuple(there))
        self.held: Held = set()
        self.log = KVEventLog(most_events=40)
        self.readers = {t: self.log.reader(t) for t in ("", "other")}
        self.sets: dict[str, Held] = {"": set(), "other": set()}
        self.contents: dict[bytes, Any] = {}

    @rule(tenant=st.sampled_from(["", "other"]))
    def somebody_reads(self, tenant: str) -> None:
        read_all(self.readers[tenant], self.sets[tenant])
        assert self.sets[tenant] == {one for one in self.held if one[1] == tenant}

    @invariant()
    def a_reader_knows_what_the_tiers_hold(self) -> None:
        events = self.recorder.take()
        apply(self.held, events)
        self.log.publish(events)
        assert self.held == self.truth()

    def truth(self) -> Held:
        """From what was computed into the memory of each tier, by the ids that it depends on."""
        assert self.kv.cold is not None
        found: Held = set()
        size, tokens = self.kv.block_size, self.places.tokens
        for block, node in self.kv.cache._nodes.items():
            found.add(self.row("device", size, self.memory[block * size + len(node.ids) - 1]))
        host = self.kv.cold.cache
        for handle in host._nodes:
            place = ("host", host.pool.slot(handle), tokens - 1)
            found.add(self.row("host", tokens, self.memory[place]))
        for key, content in self.places.on_disk.items():
            if content[-1] is not None:
                self.contents[key] = content[-1]
            found.add(self.row("disk", tokens, self.contents[key]))
        return found

    @staticmethod
    def row(tier: str, size: int, value: Any) -> tuple[str, str, bytes, bytes, int]:
        tenant, ids = value
        chain = router_chain(router_root(MODEL, tenant), [f"{i:x}" for i in ids], size)
        return (tier, tenant, *chain[-1])

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            self.recorder.take()
            self.folder.cleanup()


def read_all(reader: KVReader, held: Held) -> None:
    while True:
        taken = reader.take(7)
        if isinstance(taken, KVSnapshot):
            held.clear()
            apply(held, taken.blocks)
        elif not taken:
            return
        else:
            apply(held, [one.event for one in taken])


_SHORT = settings(max_examples=15, stateful_step_count=40, deadline=None)


def test_events_say_what_the_tiers_hold_whatever_happens() -> None:
    run_state_machine_as_test(ToldWorld, settings=_SHORT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_events_say_what_the_tiers_hold_for_long() -> None:
    many = settings(_SHORT, max_examples=300, stateful_step_count=60)
    run_state_machine_as_test(ToldWorld, settings=many)
