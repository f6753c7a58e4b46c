"""What one sequence holds, and what it was found to need not compute.

Owns: BlockTable and its runs, and BlockCopy. Does not own: who may hold what (kv_manager.py), or
what is found (prefix_lookup.py). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kv_offload.host_cache import HostNode
from kv_offload.radix_cache import Node


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole of block `source` over block `target` before the step's first write. Copies
    of a step are made in their order: a source may be the target of a later one."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Tokens that a sequence did not compute, by where their KV came from."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(slots=True)
class BlockTable:
    blocks: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    """`blocks` as (first block, count) runs, kept in step with it."""
    node: Node | None = None
    """The deepest node on the owner's path whose block is in `blocks`, or will be when the owner
    starts; None before the first look-up. One that has left the tree while the owner held its block
    was cleared: what is computed after it must not be found."""
    tail: tuple[Node, int] | None = None
    """Of an owner without blocks: a node that holds its next tokens, and how many, to be copied."""
    below_tokens: int = 0
    """Of an owner without blocks: tokens that it starts from on lower tiers, which then count
    instead of `tail`: of a large owner in place, of others from `node` on by a recall. 0 when the
    device has as much, or the rest is not worth a copy."""
    root: HostNode | None = None
    """Of the host's tree of its key."""
    seen: HostNode | None = None
    """The deepest superblock of its path on the host at the last look-up."""
    disk_keys: list[bytes] = field(default_factory=list)
    """Names of the superblocks of its path on disk, as far as they were needed."""
    version: tuple[int, int] = (-1, -1)
    """Those of the cache and of the host's index at the last look-up."""
    large: bool = False
    """Whether its beginning may leave the device. What it computes is not put into the device's
    cache: a node's ancestors are used as long as it is, and these could then not leave."""
    path: list[HostNode] = field(default_factory=list)
    """The nodes of the owner's full superblocks in the host's index, as far as they were offered to
    the host."""
    named: int = 0
    """Of a large owner: superblocks of its cold beginning that the index knows."""
    sources: Sources = Sources()

    def append(self, block: int) -> None:
        self.blocks.append(block)
        if self.runs and sum(self.runs[-1]) == block:
            first, count = self.runs[-1]
            self.runs[-1] = (first, count + 1)
        else:
            self.runs.append((block, 1))

    @property
    def starts_with(self) -> int:
        """Blocks of the device's cache that an owner without blocks would share."""
        return self.node.depth if self.node is not None and not self.in_place else 0

    @property
    def in_place(self) -> bool:
        """Whether an owner without blocks starts from superblocks where they lie."""
        return self.large and self.below_tokens > 0

    def fork(self) -> BlockTable:
        """Of another owner that has the same until one of them writes."""
        return replace(
            self,
            blocks=list(self.blocks),
            runs=list(self.runs),
            path=list(self.path),
            disk_keys=list(self.disk_keys),
        )

    def set_blocks(self, blocks: list[int]) -> None:
        self.blocks, self.runs = blocks, runs_of(blocks)


def runs_of(blocks: list[int]) -> list[tuple[int, int]]:
    """Blocks as (first block, count) runs."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
