"""A model in given number formats on given devices: what every planner computes from.

Owns: Deployment: bytes, rates, and the time of one step by the roofline. Does not own: KV's
arithmetic (kv.py), shapes, devices, or any plan. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunked_prefill.planner.devices import DeviceSpec, PlanError, require
from chunked_prefill.planner.kv import (
    ACHIEVED_FLOPS,
    ACTIVATION_BYTES,
    MEMORY_SHARE,
    bytes_of,
    kv_bytes_per_token,
    room_for_kv,
    visible_kv_bytes,
)
from chunked_prefill.planner.shapes import ModelShape

IN_WORDS = {"weights": "reading weights", "compute": "multiplying", "KV": "reading KV"}
"""Of what binds a step."""
MOST = 1e9
"""Bound of counts that a plan is asked for, so that a slip of the finger is an error."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step. Reading weights and multiplying overlap, so the longer of them counts;
    KV is read besides."""

    weights_s: float
    compute_s: float
    kv_s: float

    @property
    def total_s(self) -> float:
        return max(self.weights_s, self.compute_s) + self.kv_s

    @property
    def binds(self) -> str:
        """`weights`, `compute` or `KV`: the largest part."""
        first = "compute" if self.compute_s > self.weights_s else "weights"
        return "KV" if self.kv_s > max(self.weights_s, self.compute_s) else first


@dataclass(frozen=True, slots=True)
class Deployment:
    """`count` devices that hold one copy of the model, by tensor parallelism.

    Raises PlanError for number formats of no known size.
    """

    shape: ModelShape
    device: DeviceSpec
    count: int = 1
    weights: str = "bf16"
    kv: str = "bf16"

    def __post_init__(self) -> None:
        bytes_of("weights", self.weights)
        bytes_of("kv", self.kv)
        require("devices", self.count, 1, MOST)

    @property
    def name(self) -> str:
        return (
            f"{self.shape.name} on {self.count} x {self.device.name}, "
            f"{self.weights} weights, {self.kv} KV"
        )

    @property
    def weight_number_bytes(self) -> float:
        return bytes_of("weights", self.weights)

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        return self.shape.num_parameters * self.weight_number_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """On all devices together, repetitions included."""
        one = kv_bytes_per_token(self.shape, bytes_of("kv", self.kv), self.count)
        return one * self.count

    @property
    def room_bytes(self) -> float:
        """For KV on all devices together; negative when the weights do not fit."""
        number = self.weight_number_bytes
        return self.count * room_for_kv(self.shape, self.device, self.count, number)

    @property
    def flops_per_s(self) -> float:
        """Dense rate of all devices for these weights. Raises PlanError where it is unknown."""
        rate = self.device.flops_per_s(self.weights)
        if rate is None:
            raise PlanError(f"device {self.device.name!r} has no known rate; name one that has")
        return rate * self.count

    @property
    def bandwidth(self) -> float:
        """Bytes per second of all devices' memories. Raises PlanError where it is unknown."""
        rate = self.device.bandwidth_bytes_per_s
        if rate is None:
            raise PlanError(f"device {self.device.name!r} has no known rate; name one that has")
        return rate * self.count

    def mfu(self, given: float | None) -> float:
        """Share of the dense rate that prefill reaches: as given, else 0.4 of a data sheet's rate
        and all of a measured one."""
        if given is None:
            return 1.0 if self.device.measured else ACHIEVED_FLOPS
        require("mfu", given, 0.01, 1)
        return given

    def users(self, context: int) -> int:
        """Contexts of this length that fit."""
        return int(max(0.0, self.room_bytes) // (self.kv_bytes_per_token * context))

    def weight_reads(self, tokens: float) -> float:
        """Bytes of weights that a step over `tokens` tokens reads: of experts, only those that some
        token chose (see moe.distinct_experts)."""
        moe = self.shape.moe
        if moe is None:
            return self.weight_bytes
        unread = float((1 - moe.active / moe.experts) ** tokens)
        return self.weight_bytes - unread * self.shape.expert_parameters * self.weight_number_bytes

    def kv_reads(self, context: float) -> float:
        """Bytes of KV on all devices that a token at the end of a context reads; of a layer with a
        sliding window, the window only."""
        if context <= 0:
            return 0.0
        seen = visible_kv_bytes(self.shape, int(context), bytes_of("kv", self.kv))
        return (
            seen * self.kv_bytes_per_token / kv_bytes_per_token(self.shape, bytes_of("kv", self.kv))
        )

    def step(
        self, batch: float, context: float, rows: float = 1, mfu: float = 1.0, mbu: float = 1.0
    ) -> StepTime:
        """A decode step of `batch` sequences, `rows` tokens each (more than one: verification).

        t = max(W/BW, 2·N·B·q/F) + B·ctx·kv/BW: the roofline (Williams et al. 2009, CACM 52(4)) of
        the matrices, and attention, which reads each sequence's KV once (Pope et al. 2022, arXiv
        2211.05102, section 2). MFU and MBU are the shares of both rates that are reached.
        """
        bandwidth = mbu * self.bandwidth
        compute = 2 * self.shape.active_parameters * batch * rows / (mfu * self.flops_per_s)
        return StepTime(
            weights_s=self.weight_reads(batch * rows) / bandwidth,
            compute_s=compute,
            kv_s=batch * self.kv_reads(context) / bandwidth,
        )

    def check_fits(self) -> None:
        """Raises PlanError unless the weights leave room for KV."""
        if self.room_bytes <= 0:
            raise PlanError(self.does_not_fit())

    def does_not_fit(self) -> str:
        """That it does not, and how many devices the weights alone would take."""
        each = MEMORY_SHARE * self.device.memory_bytes - ACTIVATION_BYTES
        needed = int(self.weight_bytes // each) + 1 if each > 0 else None
        remedy = f"take {needed} or more" if needed else "take larger ones"
        return (
            f"{self.shape.name}: {self.weight_bytes / 1e9:,.1f} GB of {self.weights} weights do "
            f"not fit {self.count} x {self.device.name} of {self.device.memory_bytes / 1e9:g} GB; "
            f"{remedy}, or weights of fewer bits"
        )

    def check_context(self, tokens: int, name: str = "context") -> int:
        """`tokens`, which lie within the model's own length. Raises PlanError."""
        longest = self.shape.max_length or MOST
        require(name, tokens, 1, longest, f"{self.shape.name} goes no further")
        return tokens
