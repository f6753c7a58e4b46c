"""`longlens plan` verbs about speed: roofline, prefill, speculate, quantize, moe, batching.

Owns: their flags. Does not own: arithmetic (chunked_prefill/planner), output (plan_show.py), or the
flags that all verbs share (plan_flags.py). Each imports its planner when it is asked.
"""

from __future__ import annotations

from api.plan_flags import Shown, Target, lengths, named_numbers, seconds, whole
from api.plan_show import answer

_TARGET, _SHOWN = Target(), Shown()


def roofline(
    model: str,
    *,
    context: str = "4k",
    mfu: float = 1.0,
    mbu: float = 1.0,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Decode steps by batch: time, throughput, ridge batch, and the knee of both.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    context
        Tokens of each sequence; 4k is 4096.
    mfu
        Share of the dense rate that is reached; 1 gives bounds.
    mbu
        Share of the bandwidth that is reached.
    """
    from chunked_prefill.planner.roofline import plan_roofline

    tokens = whole("context", context)
    return answer(plan_roofline(target.deploy(model), context=tokens, mfu=mfu, mbu=mbu), shown)


def prefill(
    model: str,
    *,
    ttft: str = "200ms",
    chunk: str = "2k",
    mfu: float | None = None,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Prompts: time by length, the longest within a TTFT, chunks of equal time by depth.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    ttft
        Promise that a prompt must keep, such as 200ms.
    chunk
        Tokens of a chunk at the start of a prompt.
    mfu
        Share of the dense rate that is reached; 0.4, or 1 of a rate that was measured.
    """
    from chunked_prefill.planner.prefill import plan_prefill

    report = plan_prefill(
        target.deploy(model),
        ttft_s=seconds("ttft", ttft),
        chunk=whole("chunk", chunk),
        mfu=mfu,
    )
    return answer(report, shown)


def speculate(
    model: str,
    *,
    context: str = "1k",
    batch: int = 1,
    acceptance: float = 0.7,
    drafted: int = 4,
    draft_cost: float = 0.05,
    draft_model: str | None = None,
    tree: str = "3,2,1,1",
    further: float = 0.16,
    accepted: str = "",
    mfu: float = 0.6,
    mbu: float = 0.8,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Draft methods: tokens per step, cost, speed-up by batch, and where it ends.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    context
        Tokens of each sequence.
    batch
        Sequences that decode together.
    acceptance
        Chance that a draft model's token is accepted.
    drafted
        Tokens that a draft model drafts per step.
    draft_cost
        One pass of the draft model, in steps of the target.
    draft_model
        A folder or known shape, from whose size draft_cost follows.
    tree
        Candidates per node at each depth of a draft tree.
    further
        Share of misses that each further candidate catches.
    accepted
        Tokens per step that you measured, by method: ngram=1.9,medusa=2.5,eagle=3.2,eagle2=4.1.
    mfu
        Share of the dense rate that is reached.
    mbu
        Share of the bandwidth that is reached.
    """
    from chunked_prefill.planner.drafts import usual_methods
    from chunked_prefill.planner.model_files import find_shape
    from chunked_prefill.planner.speculate import plan_speculate

    deployment = target.deploy(model)
    if draft_model is not None:
        small = find_shape(draft_model).active_parameters
        draft_cost = small / deployment.shape.active_parameters
    methods = usual_methods(
        acceptance=acceptance,
        drafted=drafted,
        draft_cost=draft_cost,
        tree=lengths("tree", tree),
        further=further,
        measured=named_numbers("accepted", accepted),
    )
    tokens = whole("context", context)
    report = plan_speculate(deployment, methods, context=tokens, batch=batch, mfu=mfu, mbu=mbu)
    return answer(report, shown)


def quantize(
    model: str,
    *,
    context: str = "4k",
    batch: int = 32,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Number formats against bf16: size, users, decode and prefill, and where gains end.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    context
        Tokens of each sequence.
    batch
        Sequences that decode together.
    """
    from chunked_prefill.planner.quantize import plan_quantize

    tokens = whole("context", context)
    return answer(plan_quantize(target.deploy(model), context=tokens, batch=batch), shown)


def moe(model: str, *, context: str = "4k", target: Target = _TARGET, shown: Shown = _SHOWN) -> int:
    """Mixtures of experts: distinct experts and bytes that a batch reads.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as deepseek-v3.
    context
        Tokens of each sequence.
    """
    from chunked_prefill.planner.moe import plan_moe

    return answer(plan_moe(target.deploy(model), context=whole("context", context)), shown)


def batching(
    model: str,
    *,
    prompt: str = "1155",
    output: str = "211",
    max_length: str | None = None,
    block: int = 16,
    batch: int = 32,
    mfu: float | None = None,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Static against continuous batches, reserved against paged memory, stalls by prompts.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    prompt
        Mean tokens of a prompt.
    output
        Mean tokens of an answer.
    max_length
        Tokens that are reserved where memory is not paged; the model's length up to 8k.
    block
        Tokens of a KV block.
    batch
        Sequences that decode together.
    mfu
        Share of the dense rate that prefill reaches.
    """
    from chunked_prefill.planner.batching import plan_batching

    report = plan_batching(
        target.deploy(model),
        prompt=whole("prompt", prompt),
        output=whole("output", output),
        max_length=None if max_length is None else whole("max-length", max_length),
        block=block,
        batch=batch,
        mfu=mfu,
    )
    return answer(report, shown)
