"""Users per device, by how the model is split over devices.

Owns: Split, the memory of one device under it, and the comparison over contexts. Does not own: KV's
arithmetic (kv.py). Traffic between devices is not counted: it costs time, not memory.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chunked_prefill.planner.deployment import Deployment
from chunked_prefill.planner.devices import PlanError
from chunked_prefill.planner.kv import (
    ACTIVATION_BYTES,
    MEMORY_SHARE,
    bytes_of,
    kv_bytes_per_token,
    usual_contexts,
)
from chunked_prefill.planner.report import Column, Curve, Fact, Line, Report, Table, Value
from chunked_prefill.planner.shapes import ModelShape

_LINES = 6
_APART = 0.95
"""Lines whose users are closer than this would be drawn over each other."""


@dataclass(frozen=True, slots=True)
class Split:
    """tensor · pipeline · data devices. `expert`: the experts of a stage are dealt out to all its
    devices, each of which has the rest of the layer (DeepSeek-V3, arXiv 2412.19437, section 3.4).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def name(self) -> str:
        """`tp2 pp4 dp2 ep4`, sizes of 1 left out."""
        parts = (("tp", self.tensor), ("pp", self.pipeline), ("dp", self.data))
        words = [f"{word}{size}" for word, size in parts if size > 1]
        if self.expert:
            words.append(f"ep{self.tensor * self.data}")
        return " ".join(words) or "one device"


def splits(shape: ModelShape, count: int) -> Iterator[Split]:
    """All splits over `count` devices in which query heads divide evenly and each stage has a
    layer. Experts are dealt out where that frees memory: beside data parallelism."""
    for tensor in _divisors(count):
        if shape.num_heads % tensor:
            continue
        for pipeline in _divisors(count // tensor):
            if pipeline > shape.num_layers:
                continue
            data = count // tensor // pipeline
            yield Split(tensor, pipeline, data)
            if shape.moe is not None and data > 1:
                yield Split(tensor, pipeline, data, expert=True)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """Of one device, the fullest where a pipeline's stages differ."""

    weight_bytes: float
    expert_bytes: float
    """Of these, experts that are chosen among."""
    kv_bytes_per_token: float
    """Of one token of one of its users."""
    room_bytes: float
    """For KV; negative when the weights do not fit."""


def device_load(deployment: Deployment, split: Split) -> DeviceLoad:
    """Weights and KV of one device; `deployment.count` does not matter.

    Tensor parallelism divides all weights (Megatron-LM, arXiv 1909.08053) and KV heads as far as
    there are any, and repeats a latent; a pipeline divides layers (GPipe, arXiv 1811.06965) and so
    the KV of each token, latents too; data parallelism divides users. Embedding and head count as
    spread over the stages. Room: 0.9 · memory − W − 2 GB, as in kv.room_for_kv.
    """
    shape = deployment.shape
    stage = -(-shape.num_layers // split.pipeline) / shape.num_layers
    experts = shape.expert_parameters
    rest = (shape.num_parameters - experts) / split.tensor
    experts_here = experts / split.tensor / (split.data if split.expert else 1)
    scale = stage * deployment.weight_number_bytes
    weights = (rest + experts_here) * scale
    number = bytes_of("kv", deployment.kv)
    return DeviceLoad(
        weight_bytes=weights,
        expert_bytes=experts_here * scale,
        kv_bytes_per_token=kv_bytes_per_token(shape, number, split.tensor) * stage,
        room_bytes=MEMORY_SHARE * deployment.device.memory_bytes - weights - ACTIVATION_BYTES,
    )


def users_of_split(deployment: Deployment, split: Split, context: int) -> int:
    """⌊room / (ctx · kv)⌋ of one device, times the replicas: KV of all users on all devices (figure
    1 of vLLM, arXiv 2309.06180)."""
    load = device_load(deployment, split)
    return split.data * int(max(0.0, load.room_bytes) // (load.kv_bytes_per_token * context))


def token_seconds(deployment: Deployment, split: Split, context: int, users: int) -> float:
    """Time per output token of `users` contexts, by what one device reads and multiplies, as in
    Deployment.step. A pipeline of p stages holds p groups of users, and a token passes all stages.
    Raises PlanError where the device's rates are unknown."""
    load = device_load(deployment, split)
    group = users / split.data / split.pipeline
    weights = load.weight_bytes
    moe = deployment.shape.moe
    if moe is not None:
        tokens = group * (split.data if split.expert else 1)
        weights -= (1 - moe.active / moe.experts) ** tokens * load.expert_bytes
    bandwidth, flops = (
        rate / deployment.count for rate in (deployment.bandwidth, deployment.flops_per_s)
    )
    rows = 2 * deployment.shape.active_parameters / split.tensor / split.pipeline * group
    kv = group * context * load.kv_bytes_per_token
    return split.pipeline * (max(weights / bandwidth, rows / flops) + kv / bandwidth)


def plan_users(deployment: Deployment, *, contexts: tuple[int, ...] | None = None) -> Report:
    """Users of `deployment.count` devices, however the model is split over them. Raises PlanError
    for contexts that the model does not reach, and where it fits in no way."""
    contexts = (
        usual_contexts(deployment.shape) if contexts is None else tuple(sorted(set(contexts)))
    )
    if not contexts:
        raise PlanError("context lists no length; name one or more, such as 8k,32k")
    for tokens in contexts:
        deployment.check_context(tokens)
    kinds = [s for s in splits(deployment.shape, deployment.count) if _fits(deployment, s)]
    if not kinds:
        raise PlanError(deployment.does_not_fit())
    middle = contexts[len(contexts) // 2]
    kinds.sort(key=lambda s: (-users_of_split(deployment, s, middle), s.pipeline, s.data))
    best, before = kinds[0], device_load(deployment, kinds[0])
    usable = MEMORY_SHARE * deployment.device.memory_bytes
    columns = (
        *(Column("split"), Column("weights", "bytes"), Column("KV per token", "bytes")),
        *(Column(f"users at {_short(tokens)}") for tokens in contexts),
        *(Column("per device"), Column("per token", "s")),
    )
    return Report(
        planner="users",
        title=f"Users: {deployment.name}",
        formulas=(
            "users = data · floor((0.9 memory − W_device − 2 GB) / (ctx kv_device))",
            "W_device = W / (tensor · pipeline), experts also over data when they are dealt out",
            "kv_device = kv(heads / tensor, at least one) / pipeline",
        ),
        facts=(
            Fact("memory of a device", deployment.device.memory_bytes, "bytes", "0.9 is used"),
            Fact("weights", deployment.weight_bytes, "bytes", "one copy"),
            Fact(
                "KV per token",
                kv_bytes_per_token(deployment.shape, bytes_of("kv", deployment.kv)),
                "bytes",
                "one copy",
            ),
        ),
        tables=(
            Table(
                f"By split of {deployment.count} devices (tp tensor, pp pipeline, dp data, ep "
                "experts dealt out); weights and KV are\nof one device, the last two columns at "
                f"{middle:,} tokens",
                columns,
                tuple(_row(deployment, s, contexts, middle) for s in kinds),
            ),
        ),
        binds=(
            f"Memory. With {best.name} weights take {before.weight_bytes / usable:.0%} of what may "
            f"be used of a device, {max(0.0, before.room_bytes) / usable:.0%} is left for KV."
        ),
        reverses=_turns(deployment, kinds),
        curve=_curve(deployment, kinds),
    )


def _fits(deployment: Deployment, split: Split) -> bool:
    return device_load(deployment, split).room_bytes > 0


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _row(
    deployment: Deployment, split: Split, contexts: tuple[int, ...], middle: int
) -> tuple[Value, ...]:
    load = device_load(deployment, split)
    counts = [users_of_split(deployment, split, tokens) for tokens in contexts]
    here = counts[contexts.index(middle)]
    seconds = None
    if here and deployment.device.bandwidth_bytes_per_s:
        seconds = token_seconds(deployment, split, middle, here)
    first: tuple[Value, ...] = (split.name, load.weight_bytes, load.kv_bytes_per_token)
    return (*first, *counts, here / deployment.count, seconds)


def _turns(deployment: Deployment, kinds: list[Split]) -> tuple[str, ...]:
    """The contexts at which another split holds most users, to 1,024 tokens."""
    longest, turns = deployment.shape.max_length or 1 << 20, []
    best: Split | None = None
    tokens = 1024
    while tokens <= longest:
        counts = {s: users_of_split(deployment, s, tokens) for s in kinds}
        most = max(counts.values())
        if most == 0:
            turns.append(f"From {tokens:,} tokens on not one context fits.")
            break
        if best is None or counts[best] < 0.98 * most:
            now = max(kinds, key=lambda s: counts[s])
            if best is not None:
                turns.append(
                    f"From about {tokens:,} tokens on {now.name} holds more "
                    f"({most:,}) than {best.name} ({counts[best]:,})."
                )
            best = now
        tokens += max(1024, tokens // 16 // 1024 * 1024)
    shape = deployment.shape
    if shape.mla is not None:
        turns.append("Tensor parallelism repeats latents on each device: split users instead.")
    elif deployment.count > shape.num_kv_heads:
        turns.append(
            f"Beyond {shape.num_kv_heads} devices tensor parallelism repeats KV heads: further "
            "devices free weights' room only."
        )
    if len(kinds) > 1 and kinds[0].tensor > 1:
        turns.append(
            f"{kinds[0].name} makes all devices read for each token, and exchange activations in "
            "each layer; data parallelism does neither and holds fewer users."
        )
    return tuple(turns) or (f"No split holds more at any length up to {longest:,} tokens.",)


def _curve(deployment: Deployment, kinds: list[Split]) -> Curve:
    longest = deployment.shape.max_length or 1 << 20
    xs = tuple(1024 * (longest / 1024) ** (i / 60) for i in range(61))
    lines: list[Line] = []
    for split in kinds:
        counts = [float(users_of_split(deployment, split, int(x))) for x in xs]
        kept = sum(count > 0 for count in counts)
        near = any(_APART < counts[0] / line.y[0] < 1 / _APART for line in lines)
        if kept > 1 and not near:
            lines.append(Line(split.name, xs[:kept], tuple(counts[:kept])))
    return Curve(
        title=f"Users by context\n{deployment.name}",
        x_label="context [tokens]",
        y_label="users",
        lines=tuple(lines[:_LINES]),
        log_x=2,
        log_y=True,
    )
