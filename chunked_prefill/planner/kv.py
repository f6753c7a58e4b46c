"""How much KV a model needs, how many users fit, and what memory beside the device buys.

Owns: the arithmetic of KV and its plan for one model on one kind of device. Does not own: models
(shapes.py), devices (devices.py), or how a plan is shown (api/plan_cli.py). Imports no torch.

Units are decimal: 1 GB is 1e9 bytes. A context of 128k is 131,072 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunked_prefill.planner.devices import MOST_DEVICES, DeviceSpec, PlanError, require
from chunked_prefill.planner.shapes import ModelShape

BYTES_PER_NUMBER: dict[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
    "w4a16": 0.53,
}
"""Stored bytes per weight or KV number; w4a16 counts its scales (groups of 128)."""

MEMORY_SHARE = 0.9
"""Of a device's memory that may be used; the rest is the driver's, the libraries' and luck's."""
ACTIVATION_BYTES = 2e9
"""Set aside per device for activations and buffers."""
ACHIEVED_FLOPS = 0.4
"""Share of the dense rate that prefill reaches."""
USUAL_CONTEXTS = (8192, 32_768, 131_072)
CPU_BANDWIDTH = 200e9
"""Bytes per second of KV that a server's CPU is taken to attend: eight channels of DDR5-4800 read
307e9 at most."""


def kv_bytes_per_token(shape: ModelShape, number_bytes: float, parallel: int = 1) -> float:
    """KV of one token on one of `parallel` devices, in all layers.

    2 · L · n_kv · d · s: a key and a value per KV head (Pope et al. 2022, arXiv 2211.05102). MLA:
    (latent + rope) · L · s (DeepSeek-V2, arXiv 2405.04434, table 1). Tensor parallelism shares KV
    heads out, repeats them when there are fewer than devices, and repeats a latent on each device.
    """
    if shape.mla is not None:
        return (shape.mla.latent + shape.mla.rope_dim) * shape.num_layers * number_bytes
    heads = -(-shape.num_kv_heads // parallel)
    return 2 * shape.num_layers * heads * shape.head_dim * number_bytes


def visible_kv_bytes(shape: ModelShape, tokens: int, number_bytes: float) -> float:
    """KV of one context that a query at its end can see: of a sliding layer, the window only. This
    server keeps all of it, so that a prefix can be used again from any place."""
    per_layer = kv_bytes_per_token(shape, number_bytes) / shape.num_layers
    windows = shape.windows or (None,) * shape.num_layers
    return per_layer * sum(min(tokens, window or tokens) for window in windows)


def room_for_kv(shape: ModelShape, device: DeviceSpec, count: int, weight_bytes: float) -> float:
    """Bytes left for KV on each of `count` devices that share the weights: 0.9 · memory − W − 2 GB,
    weights, KV and the rest as in figure 1 of vLLM (arXiv 2309.06180). Negative: does not fit."""
    weights = shape.num_parameters * weight_bytes / count
    return MEMORY_SHARE * device.memory_bytes - weights - ACTIVATION_BYTES


def users(room: float, context_bytes: float) -> int:
    """⌊room / (context · bytes per token)⌋: contexts that can be held at a time."""
    return int(max(0.0, room) // context_bytes)


def smallest_chunk(
    shape: ModelShape, tokens: int, number_bytes: float, flops_per_s: float, link: float
) -> float:
    """Tokens that a chunk needs so that its compute hides the copying of `tokens` of cold KV.

    Per layer, compute C · (2P + 4 · n_q · d · (L + C/2)) / F equals transfer 2 · n_kv · d · s · L /
    B: the balance of computing and loading of FlexGen (arXiv 2303.06865), for a chunk over a cached
    beginning. P are the layer's weights. Grows with L towards s · F / (2 · g · B).
    """
    per_layer = kv_bytes_per_token(shape, number_bytes) / shape.num_layers
    need = per_layer * tokens / link * flops_per_s
    square = 2 * shape.attention_width
    linear = 2 * shape.layer_parameters + 4 * shape.attention_width * tokens
    return float((-linear + (linear**2 + 4 * square * need) ** 0.5) / (2 * square))


def prefill_seconds(shape: ModelShape, tokens: int, flops_per_s: float) -> float:
    """(2 · N · S + 2 · L · d · S²) / F: two operations per weight and token (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1), and causal attention over half of S² pairs."""
    attention = 2 * shape.num_layers * shape.attention_width * tokens**2
    return (2 * shape.active_parameters * tokens + attention) / flops_per_s


def usual_contexts(shape: ModelShape) -> tuple[int, ...]:
    """8k, 32k and 128k as far as the model goes, and its own length where that cuts the row."""
    most = USUAL_CONTEXTS[-1]
    longest = min(shape.max_length or most, most)
    return (*(n for n in USUAL_CONTEXTS if n < longest), longest)


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """One length of context. Seconds are None where the device's rates are unknown."""

    tokens: int
    kv_bytes: float
    """Of one user, on all devices together."""
    visible_bytes: float
    """Of these, what a query at the end can see (stored once): less with sliding windows."""
    users: int
    """Contexts that fit the devices."""
    users_with_host: int
    """Contexts that devices and host hold: those that are not computed at the moment wait there."""
    copy_seconds: float | None
    """Its KV over all links: to go on after it waited in the host, and for every decoded token of a
    request that lies there wholly and is streamed."""
    cpu_seconds: float | None
    """For such a token, when the CPU attends where the KV lies."""
    prefill_seconds: float | None
    """To compute the KV instead of keeping it."""
    smallest_chunk: int | None
    """Tokens of a chunk that hides the copies of a context that lies in the host wholly; None for
    latents also, whose attention has another cost."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """A model's KV on `count` devices that share it (tensor parallelism)."""

    model: str
    device: str
    count: int
    parameters: int
    weight_bytes: float
    """Of all weights."""
    kv_bytes_per_token: float
    """On all devices together, repetitions included."""
    repeated: float
    """How often a token's KV is stored for the sake of parallelism; 1.0 is once."""
    room_bytes: float
    """For KV on all devices together; negative when the weights do not fit."""
    host_bytes: float
    largest_context: int
    """Tokens of one request that fit the devices alone, whatever the model's own length."""
    largest_with_host: int
    """Tokens of one request whose KV may lie in the host as well."""
    model_length: int | None
    """Tokens that the model was made for; None where its configuration does not say."""
    contexts: tuple[ContextPlan, ...]


def plan_kv(
    shape: ModelShape,
    device: DeviceSpec,
    count: int = 1,
    *,
    weights: str = "bf16",
    kv: str = "bf16",
    contexts: tuple[int, ...] | None = None,
    host_bytes: float = 0.0,
) -> KVPlan:
    """The plan. Raises PlanError for number formats of no known size, and for contexts under one
    token or beyond the model's own length."""
    weight_bytes, number_bytes = bytes_of("weights", weights), bytes_of("kv", kv)
    require("devices", count, 1, MOST_DEVICES)
    require("host_bytes", host_bytes, 0, 1e18, "0 plans without host memory")
    if contexts is None:
        contexts = usual_contexts(shape)
    if not contexts:
        raise PlanError("context lists no length; name one or more, such as 8k,32k")
    for tokens in contexts:
        require("context", tokens, 1, shape.max_length or 1e9, f"{shape.name} goes no further")
    room = room_for_kv(shape, device, count, weight_bytes) * count
    per_token = kv_bytes_per_token(shape, number_bytes, count) * count
    once = kv_bytes_per_token(shape, number_bytes)
    everywhere = max(0.0, room)

    def one(tokens: int) -> ContextPlan:
        spread, stored = per_token * tokens, once * tokens
        flops = device.bf16_flops_per_s and device.bf16_flops_per_s * count
        link = device.link_bytes_per_s and device.link_bytes_per_s * count
        chunk = None
        if flops and link and shape.mla is None:
            chunk = round(smallest_chunk(shape, tokens, number_bytes, ACHIEVED_FLOPS * flops, link))
        return ContextPlan(
            tokens=tokens,
            kv_bytes=spread,
            visible_bytes=visible_kv_bytes(shape, tokens, number_bytes),
            users=users(room, spread),
            users_with_host=users(room, spread) + int(host_bytes // stored),
            copy_seconds=spread / link if link else None,
            cpu_seconds=stored / CPU_BANDWIDTH if link else None,
            prefill_seconds=prefill_seconds(shape, tokens, ACHIEVED_FLOPS * flops)
            if flops
            else None,
            smallest_chunk=chunk,
        )

    return KVPlan(
        model=shape.name,
        device=device.name,
        count=count,
        parameters=shape.num_parameters,
        weight_bytes=shape.num_parameters * weight_bytes,
        kv_bytes_per_token=per_token,
        repeated=per_token / once,
        room_bytes=room,
        host_bytes=host_bytes,
        largest_context=int(everywhere // per_token),
        largest_with_host=int(everywhere // per_token) + int(host_bytes // once),
        model_length=shape.max_length,
        contexts=tuple(one(tokens) for tokens in contexts),
    )


def bytes_of(what: str, name: str) -> float:
    """Stored bytes per number of a format. Raises PlanError, in which `what` names the field."""
    if name not in BYTES_PER_NUMBER:
        raise PlanError(
            f"{what} {name!r} has no known size. Known are: {', '.join(BYTES_PER_NUMBER)}."
        )
    return BYTES_PER_NUMBER[name]
