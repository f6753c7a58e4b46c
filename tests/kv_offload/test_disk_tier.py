"""The disk tier: found after a restart, bounded, and never a wrong answer."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kv_offload import disk_file
from kv_offload.disk_key import KEY_BYTES, chain_key, root_key, tenant_mark
from kv_offload.disk_tier import DiskTier, DiskTierError, check_folder
from kv_offload.host_memory import HostMemory
from kv_offload.layout import KVLayout
from kv_offload.radix_cache import CacheKey
from kv_offload.superblock import SuperblockLayout
from kv_offload.tickets import CopyError, TransferError
from tests.kv_offload.tiers import LAYOUT, Rig

ROOT = bytes(KEY_BYTES)
KEYS = [chain_key(ROOT, (index,)) for index in range(6)]
FILE_BYTES = disk_file.HEADER.size + LAYOUT.num_bytes


class Disk:
    """A tier over its own host memory, whose slots hold their numbers."""

    def __init__(self, folder: Path, files: int = 4, layout: SuperblockLayout = LAYOUT) -> None:
        self.memory = HostMemory(layout, 4)
        for slot in range(4):
            self.memory.superblocks[slot].normal_()
        size = disk_file.HEADER.size + layout.num_bytes
        self.tier = DiskTier(folder, layout, self.memory, files * size)

    def save(self, slot: int, key: bytes) -> torch.Tensor:
        self.tier.save(slot, key).run()
        self.tier.check_invariants()
        return self.memory.superblocks[slot].clone()

    def fetch(self, key: bytes, slot: int) -> torch.Tensor:
        self.memory.poison([slot])
        self.tier.fetch(key, slot).run()
        return self.memory.superblocks[slot].clone()


def _file(folder: Path, key: bytes) -> Path:
    return folder / f"{key.hex()}.kv"


def test_kv_survives_a_restart(tmp_path: Path) -> None:
    first = Disk(tmp_path)
    saved = [first.save(slot, KEYS[slot]) for slot in range(3)]
    first.tier.close()
    second = Disk(tmp_path)
    assert [key in second.tier for key in KEYS[:4]] == [True, True, True, False]
    for slot, wanted in enumerate(saved):
        assert torch.equal(second.fetch(KEYS[slot], 3), wanted)
    assert second.tier.stats.hits == 3
    second.tier.close()


def test_a_key_that_is_not_there_is_a_miss(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    with pytest.raises(CopyError, match="missing"):
        disk.fetch(KEYS[0], 0)
    assert disk.tier.stats.misses == 1
    disk.tier.close()


@pytest.mark.parametrize("place", [0, 8, 40, 72, 80, disk_file.HEADER.size, FILE_BYTES - 1])
def test_a_bit_that_turned_is_a_miss(
    tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the magic, the fingerprint, the key, the length, the digest and the bytes."""
    disk = Disk(tmp_path)
    disk.save(0, KEYS[0])
    file = _file(tmp_path, KEYS[0])
    content = bytearray(file.read_bytes())
    assert len(content) == FILE_BYTES
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(CopyError, match="broken"):
        disk.fetch(KEYS[0], 1)
    assert f"{file} is a miss, and removed: it" in caplog.text
    assert KEYS[0] not in disk.tier
    assert not file.exists()
    assert disk.tier.stats.broken == 1
    disk.tier.check_invariants()
    saved = disk.save(0, KEYS[0])
    assert torch.equal(disk.fetch(KEYS[0], 1), saved)
    disk.tier.close()


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (0, "ends after 0 bytes"),
        (disk_file.HEADER.size - 1, "within its header"),
        (disk_file.HEADER.size, "truncated: 0 of"),
        (FILE_BYTES - 1, "truncated"),
        (FILE_BYTES + 1, "goes on after its end"),
    ],
)
def test_a_truncated_or_longer_file_is_a_miss(
    tmp_path: Path, length: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path)
    disk.save(0, KEYS[0])
    disk.tier.close()
    file = _file(tmp_path, KEYS[0])
    file.write_bytes((file.read_bytes() + b"x")[:length])
    disk = Disk(tmp_path)
    with pytest.raises(CopyError, match="broken"):
        disk.fetch(KEYS[0], 0)
    assert reason in caplog.text
    disk.tier.close()


def test_another_models_or_prompts_file_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path)
    disk.save(0, KEYS[0])
    disk.save(1, KEYS[1])
    disk.tier.close()
    os.replace(_file(tmp_path, KEYS[0]), _file(tmp_path, KEYS[2]))
    same_size = SuperblockLayout(KVLayout(3, 4, 2, block_size=4), tokens=16)
    other = Disk(tmp_path, layout=same_size)
    with pytest.raises(CopyError, match="broken"):
        other.fetch(KEYS[1], 0)
    assert "of another KV format" in caplog.text
    other.tier.close()
    disk = Disk(tmp_path)
    with pytest.raises(CopyError, match="broken"):
        disk.fetch(KEYS[2], 0)
    assert f"holds the key {KEYS[0].hex()}" in caplog.text
    disk.tier.close()


def test_a_file_that_vanished_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(tmp_path)
    disk.save(0, KEYS[0])
    _file(tmp_path, KEYS[0]).unlink()
    with pytest.raises(CopyError, match="missing"):
        disk.fetch(KEYS[0], 0)
    assert "is a miss: somebody else removed it" in caplog.text
    stats = disk.tier.stats
    assert (stats.misses, stats.broken, stats.files, stats.num_bytes) == (1, 0, 0, 0)
    disk.tier.close()


def test_the_bound_holds_and_the_least_used_leaves(tmp_path: Path) -> None:
    disk = Disk(tmp_path, files=3)
    for index in range(3):
        disk.save(0, KEYS[index])
    disk.fetch(KEYS[0], 1)
    for index in (3, 4):
        disk.save(0, KEYS[index])
        used = sum(f.stat().st_size for f in tmp_path.iterdir())
        assert used <= 3 * FILE_BYTES
    assert [key in disk.tier for key in KEYS] == [True, False, False, True, True, False]
    assert disk.tier.stats.evictions == 2
    disk.tier.close()
    smaller = Disk(tmp_path, files=2)
    assert smaller.tier.stats.files == 2
    assert smaller.tier.stats.num_bytes == 2 * FILE_BYTES
    assert len(list(tmp_path.glob("*.kv"))) == 2
    smaller.tier.close()


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for index in range(3):
        disk.save(0, KEYS[index])
        os.utime(_file(tmp_path, KEYS[index]), (index, index))
    disk.fetch(KEYS[0], 1)
    disk.tier.close()
    disk = Disk(tmp_path, files=3)
    disk.save(0, KEYS[5])
    assert [key in disk.tier for key in KEYS[:3]] == [True, False, True]
    disk.tier.close()


def test_saving_twice_writes_once(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.save(0, KEYS[0])
    disk.save(1, KEYS[0])
    assert disk.tier.stats.saves == 1
    disk.tier.close()


def test_unfinished_files_are_removed_and_strangers_stay(tmp_path: Path) -> None:
    (tmp_path / f"{KEYS[0].hex()}.part").write_bytes(b"half")
    for name in ("notes.txt", "short.kv", "z" * 64 + ".kv"):
        (tmp_path / name).write_text("mine")
    os.symlink("/etc/hostname", _file(tmp_path, KEYS[1]))
    disk = Disk(tmp_path)
    assert disk.tier.stats.files == 0
    left = {"notes.txt", "short.kv", "z" * 64 + ".kv", "lock", f"{KEYS[1].hex()}.kv"}
    assert set(os.listdir(tmp_path)) == left
    disk.tier.close()


def test_a_disk_that_fails_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path)

    def broken(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk_file.os, "replace", broken)
    with pytest.raises(CopyError, match="disk"):
        disk.save(0, KEYS[0])
    assert "was not saved" in caplog.text
    assert os.listdir(tmp_path) == ["lock"]
    assert KEYS[0] not in disk.tier
    disk.tier.check_invariants()
    disk.tier.close()


class SmallDisk:
    """Has room for `files` files of a tier, whatever the tier believes."""

    def __init__(self, folder: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.files = folder, files
        self._write = disk_file.write
        monkeypatch.setattr(disk_file, "write", self.write)
        monkeypatch.setattr(shutil, "disk_usage", self.usage)

    @property
    def free_bytes(self) -> int:
        held = sum(file.stat().st_size for file in self.folder.glob("*.kv"))
        return self.files * FILE_BYTES - held

    def write(self, path: Path, *content: object) -> None:
        if self.free_bytes < FILE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write(path, *content)  # type: ignore[arg-type]

    def usage(self, path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=max(0, self.free_bytes))


def test_a_full_disk_lowers_the_bound_until_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, small = Disk(tmp_path, files=6), SmallDisk(tmp_path, 2, monkeypatch)
    for key in KEYS[:3]:
        disk.save(0, key)
    assert [key in disk.tier for key in KEYS[:3]] == [False, True, True], "the oldest made way"
    disk.fetch(KEYS[1], 1)
    disk.save(0, KEYS[3])
    assert [key in disk.tier for key in KEYS[:4]] == [False, True, False, True], "the least used"
    assert disk.tier.max_files == 2
    assert disk.tier.stats.evictions == 2
    (said,) = [record.message for record in caplog.records]
    assert f"It holds 2 files, {2 * FILE_BYTES:,} bytes" in said
    assert f"instead of the {6 * FILE_BYTES:,} of --disk-kv-gib" in said
    small.files = 9
    for key in KEYS:
        disk.save(0, key)
    assert all(key in disk.tier for key in KEYS)
    assert disk.tier.max_files == 6
    assert len(caplog.records) == 1
    disk.tier.close()


def test_a_disk_that_others_filled_fails_saves_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, small = Disk(tmp_path), SmallDisk(tmp_path, 1, monkeypatch)
    disk.save(0, KEYS[0])
    small.files = 0
    for key in KEYS[1:4]:
        with pytest.raises(CopyError, match="disk"):
            disk.save(0, key)
        disk.tier.check_invariants()
    assert len(caplog.records) == 1
    assert os.listdir(tmp_path) == ["lock"]
    small.files = 1
    saved = disk.save(1, KEYS[5])
    assert torch.equal(disk.fetch(KEYS[5], 0), saved)
    disk.tier.close()


def test_a_bound_beyond_the_disk_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path, files=9)
    disk.save(0, KEYS[0])
    disk.tier.close()
    SmallDisk(tmp_path, 3, monkeypatch)
    check_folder(tmp_path, 3 * FILE_BYTES)
    assert not caplog.records, "what its own files hold is room, too"
    check_folder(tmp_path, 3 * FILE_BYTES + 1)
    assert f"--disk-kv-gib allows {3 * FILE_BYTES + 1:,} bytes in {tmp_path}" in caplog.text
    assert f"where {3 * FILE_BYTES:,} are free or held by its files" in caplog.text


@pytest.mark.parametrize("name", ["scandir", "unlink"])
def test_a_folder_that_cannot_be_searched_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{KEYS[0].hex()}.part").write_bytes(b"half")

    def denied(path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, name, denied)
    with pytest.raises(
        DiskTierError, match=r"cannot be used: Permission denied\. Give --disk-kv-p"
    ):
        Disk(tmp_path)
    monkeypatch.undo()
    Disk(tmp_path).tier.close()


def test_nobody_else_can_read_prompts(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "kv")
    disk.save(0, KEYS[0])
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE(_file(tmp_path / "kv", KEYS[0]).stat().st_mode) == 0o600
    disk.tier.close()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    with pytest.raises(DiskTierError, match="used by another server; give each its own"):
        Disk(tmp_path)
    disk.tier.close()
    Disk(tmp_path).tier.close()


def test_folders_and_bounds_that_do_not_work_are_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTierError, match="cannot be used: Not a directory"):
        Disk(tmp_path / "file" / "kv")
    with pytest.raises(DiskTierError, match=r"takes 3,\d+\. Use --disk-kv-gib 0\.0001 or"):
        DiskTier(tmp_path, LAYOUT, HostMemory(LAYOUT, 1), 1000)


def test_keys_name_the_whole_prompt_and_everything_it_depends_on() -> None:
    a, b = b"\x01", b"\x02"
    chains = {
        chain_key(ROOT, a),
        chain_key(ROOT, b),
        chain_key(chain_key(ROOT, a), b),
        chain_key(chain_key(ROOT, b), a),
        chain_key(b"\x01" + ROOT[1:], a),
    }
    assert len(chains) == 5
    assert all(len(key) == KEY_BYTES for key in chains)
    with pytest.raises(ValueError, match="40 bytes, not 16"):
        chain_key(bytes(16), a)


def test_a_reset_removes_the_files_of_one_tenant_for_good(tmp_path: Path) -> None:
    roots = {tenant: root_key(CacheKey(tenant)) for tenant in ("one", "two")}
    keys = {t: [chain_key(root, (i,)) for i in range(2)] for t, root in roots.items()}
    disk = Disk(tmp_path, files=9)
    for key in (*keys["one"], *keys["two"]):
        disk.save(0, key)
    late = disk.tier.save(0, chain_key(roots["one"], (7,)))
    disk.tier.clear(tenant_mark("one"))
    with pytest.raises(CopyError, match="cleared"):
        late.run()
    found = [key in disk.tier for key in (*keys["one"], *keys["two"])]
    assert found == [False, False, True, True]
    assert disk.tier.stats.cleared == 2
    disk.save(0, chain_key(roots["one"], (8,)))
    disk.tier.close()
    again = Disk(tmp_path, files=9)
    assert again.tier.stats.files == 3, "a restart finds no more"
    again.tier.clear(b"")
    assert again.tier.stats.files == 0
    assert not list(tmp_path.glob("*.kv"))
    again.tier.close()


def test_tickets_go_to_disk_and_back(tmp_path: Path) -> None:
    rig = Rig(verify=True, folder=tmp_path)
    blocks = rig.blocks(4)
    before = rig.content(blocks)
    superblock = rig.stored(blocks)
    rig.transfers.join(rig.transfers.save(superblock, KEYS[0]))
    rig.host.free([superblock])
    rig.host.drop(superblock)
    rig.memory.poison(range(4))
    again = rig.superblock()
    rig.transfers.join(rig.transfers.fetch(KEYS[0], again))
    target = rig.blocks(4)
    rig.transfers.join(rig.transfers.load(again, target))
    assert torch.equal(rig.content(target), before)
    missing = rig.superblock()
    with pytest.raises(TransferError, match=r"fetch \d failed: missing"):
        rig.transfers.join(rig.transfers.fetch(KEYS[1], missing))
    rig.host.free([missing])
    partial = rig.stored(rig.blocks(2))
    with pytest.raises(TransferError, match="holds 2 blocks; only those with all 4"):
        rig.transfers.save(partial, KEYS[2])
    assert rig.disk is not None
    rig.disk.close()
