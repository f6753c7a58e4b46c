"""Host and disk as the second and third level of the prefix cache.

Owns: LowerTiers, which puts together what is stored for later (write_through.py) and what comes
back (recall.py) over one set of copies (transfer.py), and hears of their ends. Does not own: the
parts, or the block tables (kv_manager.py). Imports no torch.
"""

from __future__ import annotations

from collections import Counter

from kv_offload.cold_prefix import ColdPrefixes
from kv_offload.disk_key import tenant_mark
from kv_offload.recall import Loaded, Recalls
from kv_offload.recall_cost import CostModel, Worth
from kv_offload.transfer import Transfers
from kv_offload.write_through import WriteThrough

_LAST_SAVES_S = 2.0
"""What a server that ends waits for."""


class LowerTiers:
    """`block_size` tokens and `bytes_per_token` bytes are those of the device's cache."""

    def __init__(
        self,
        cold: ColdPrefixes,
        transfers: Transfers,
        cost: CostModel,
        *,
        block_size: int,
        bytes_per_token: int,
    ) -> None:
        self.transfers = transfers
        self.stores = WriteThrough(cold, transfers)
        self.recalls = Recalls(cold, transfers, block_size)
        self.worth = Worth(
            cold.cache, transfers, cost, block_size=block_size, bytes_per_token=bytes_per_token
        )
        self.stalled_seconds = 0.0
        """That `wait` has slept while a sequence waited for its KV and nobody else could go on."""
        self._host = cold.cache
        self._cold = cold

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something to do without anybody asking."""
        return self.stores.busy or self.transfers.num_awaited > 0

    def poll(self) -> list[Loaded]:
        """Once per step: closes copies that ended, starts what may start; whose recalls ended."""
        for answer in self.transfers.poll():
            # Others' answers, and those that one before them made worthless, are nobody's here.
            if not self.recalls.heard(answer):
                self.stores.heard(answer)
        self.stores.go_on()
        return self.recalls.go_on()

    def wait(self, timeout_s: float) -> None:
        """Sleeps until `poll` may have something to do."""
        began = self.transfers.now()
        self.transfers.wait(timeout_s)
        if self.recalls.busy:
            self.stalled_seconds += self.transfers.now() - began

    def clear(self, tenant: str | None) -> None:
        """Forgets everything on host and disk, or everything of one tenant."""
        self._host.clear(tenant)
        disk = self.transfers.disk
        if disk is not None:
            disk.clear(b"" if tenant is None else tenant_mark(tenant))

    def close(self) -> None:
        """Ends all copies, after those to disk that can still be made in a moment."""
        left_s = _LAST_SAVES_S
        while self.busy and left_s > 0:
            before = self.transfers.now()
            self.poll()
            self.transfers.wait(0.05)
            left_s -= max(0.001, self.transfers.now() - before)
        self.transfers.close()
        if self.transfers.disk is not None:
            self.transfers.disk.close()

    def check_invariants(self) -> None:
        self.transfers.check_invariants()
        self.recalls.check_invariants()
        expected: Counter[int] = self._cold.references() + self.transfers.held_superblocks()
        expected += self.stores.reserved() + self.recalls.reserved()
        found = self._host.pool.references()
        if found != expected:
            raise AssertionError(f"superblocks have references {found}, known are {dict(expected)}")
