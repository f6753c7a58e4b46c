"""Devices by what their data sheets say.

Owns: DeviceSpec, the table of known devices, this machine as one, and PlanError with the check of
numbers that every planner makes. Does not own: what is done with the numbers, or the measuring of
this machine (this_machine.py). Imports no torch.

Units are decimal (1e9, 1e12). Rates are dense, without sparsity, from the makers' data sheets.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

THIS_MACHINE = "this"
MOST_DEVICES = 4096
"""That share one model."""


class PlanError(ValueError):
    """A plan was asked for that makes no sense; the message names the value and the remedy."""


def require(name: str, value: float, least: float, most: float, why: str = "") -> None:
    """Raises PlanError unless least <= value <= most; NaN is refused too. `name` is the flag or
    parameter, `why` follows the numbers."""
    if not least <= value <= most:
        raise PlanError(
            f"{name} is {_written(value)}; it must be from {_written(least)} to {_written(most)}"
            f"{why and ': '}{why}"
        )


def _written(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value.is_integer() else f"{value:g}"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float | None
    """Of the device's own memory; None where nobody has measured it."""
    bf16_flops_per_s: float | None
    fp8_flops_per_s: float | None
    """None where the device has no such units."""
    link_bytes_per_s: float | None
    """What host-to-device copies in large pieces reach, about 0.8 of the link's rate."""
    measured: bool = False
    """The rates were measured, so they need no factor for what a program reaches of them."""

    def flops_per_s(self, weights: str) -> float | None:
        """Of one device for weights of this format: the fp8 rate for fp8 where there are such
        units, else bf16's, to which smaller weights are widened."""
        return (weights == "fp8" and self.fp8_flops_per_s) or self.bf16_flops_per_s


DEVICES: dict[str, DeviceSpec] = {
    spec.name.lower(): spec
    for spec in (
        DeviceSpec("A100", 80e9, 2.039e12, 312e12, None, 25e9),
        DeviceSpec("H100", 80e9, 3.35e12, 989.5e12, 1979e12, 50e9),
        DeviceSpec("H200", 141e9, 4.8e12, 989.5e12, 1979e12, 50e9),
        DeviceSpec("B200", 180e9, 8.0e12, 2250e12, 4500e12, 50e9),
        DeviceSpec("L4", 24e9, 0.3e12, 121e12, 242e12, 25e9),
        DeviceSpec("RTX4090", 24e9, 1.008e12, 165.2e12, 330.3e12, 25e9),
    )
}
"""By name in small letters. NVIDIA data sheets of A100 80GB SXM, H100 SXM, H200 SXM, HGX B200, L4;
Ada architecture white paper for the RTX 4090 (bf16 with fp32 accumulation)."""


def find_device(name: str) -> tuple[DeviceSpec, int]:
    """A device and how many of it: `H100`, `8xH100`, `rtx 4090`, `this`. Raises PlanError."""
    match = re.fullmatch(r"(?:(\d{1,6})\s*[x×]\s*)?(.+)", name.strip().lower())
    count, wanted = int((match and match[1]) or 1), (match[2] if match else "")
    if not 1 <= count <= MOST_DEVICES:
        raise PlanError(
            f"device {name!r} counts {count:,}; give a number from 1 to {MOST_DEVICES:,}, "
            "as in 8xH100"
        )
    if wanted == THIS_MACHINE:
        return this_machine(), count
    spec = DEVICES.get(re.sub(r"[\s_-]", "", wanted))
    if spec is None:
        names = ", ".join(known.name for known in DEVICES.values())
        raise PlanError(f"device {name!r} is not known. Known are: {names}, and {THIS_MACHINE}.")
    return spec, count


def this_machine() -> DeviceSpec:
    """This machine's memory. Its rates are in no table: this_machine.measured() fills them in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceSpec("this machine", float(total), None, None, None, None)
