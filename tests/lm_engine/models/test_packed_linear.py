"""Packed linears compute what plain ones do, and keep one copy of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm_engine.models.config import DecoderConfig
from lm_engine.models.decoder import Decoder
from lm_engine.models.linear import Linear
from lm_engine.models.packed_linear import (
    PackedLinear,
    PackError,
    PlainLinear,
    can_pack,
    pack,
    round_up_rows,
)

ROWS = [0, 1, 2, 3, 4, 5, 8, 16, 33]


def make_linear(inputs: int, outputs: int, bias: bool) -> Linear:
    linear = Linear(inputs, outputs, bias=bias)
    torch.manual_seed(inputs)
    torch.nn.init.normal_(linear.weight)
    if linear.bias is not None:
        torch.nn.init.normal_(linear.bias)
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["packed", "plain"])
@pytest.mark.parametrize("size", [(64, 192), (36, 100), (8, 8)])
def test_all_row_counts_give_the_same_product(kind: str, bias: bool, size: tuple[int, int]) -> None:
    linear = make_linear(*size, bias)
    ours = PlainLinear(linear.weight, linear.bias) if kind == "plain" else PackedLinear(linear)
    for rows in ROWS:
        wide = torch.randn(rows, 2 * size[0])
        for x in (wide[:, : size[0]].contiguous(), wide[:, size[0] :]):
            got = ours(x)
            assert got.is_contiguous()
            torch.testing.assert_close(
                got, F.linear(x, linear.weight, linear.bias), atol=2e-5, rtol=0
            )


def make_decoder(tied: bool) -> Decoder:
    config = DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 200,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": tied,
        }
    )
    decoder = Decoder(config)
    torch.manual_seed(0)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return decoder


def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands for attention: depends on all its inputs."""
    return q * (layer + 1) + (k + v).repeat_interleave(2, dim=1)


def run(decoder: Decoder, rows: int) -> Tensor:
    ids = torch.arange(rows)
    return decoder.logits(decoder(decoder.embed(ids), ids, mix))


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_decoder_answers_alike(tied: bool) -> None:
    plain = make_decoder(tied)
    packed = pack(copy.deepcopy(plain))
    assert not any(isinstance(module, Linear) for module in packed.modules())
    for rows in (1, 2, 5, 40):
        torch.testing.assert_close(run(packed, rows), run(plain, rows), atol=2e-5, rtol=0)


def test_a_tied_head_goes_on_sharing_its_table() -> None:
    decoder = pack(make_decoder(tied=True))
    assert isinstance(decoder.head, PlainLinear)
    assert decoder.head.weight is decoder.embedding.weight


def test_packing_releases_the_plain_weights() -> None:
    decoder = make_decoder(tied=False)
    pack(decoder)
    left = {name for name, _ in decoder.named_parameters()}
    assert not any(name.endswith(("qkv.weight", "o.weight", "down.weight")) for name in left)
    assert not any(name.startswith(("layers.0.gate_up", "head")) for name in left)


def test_what_cannot_be_packed_is_refused_with_a_reason() -> None:
    decoder = make_decoder(tied=True).double()
    assert not can_pack(decoder)
    with pytest.raises(PackError, match=r"cannot pack torch\.float64 weights on cpu"):
        pack(decoder)


def test_bfloat16_is_packed_where_the_cpu_has_it() -> None:
    decoder = make_decoder(tied=True).bfloat16()
    if not can_pack(decoder):
        with pytest.raises(PackError):
            pack(decoder)
        return
    packed = pack(copy.deepcopy(decoder))
    for rows in (1, 3, 20):
        torch.testing.assert_close(run(packed, rows), run(decoder, rows), atol=0.05, rtol=0)


def test_prompts_of_all_lengths_need_few_generated_kernels() -> None:
    """oneDNN never forgets the kernels of a row count, so a server must not bring ever new ones."""
    asked = {rows: round_up_rows(rows) for rows in range(1, 4097)}
    assert len(set(asked.values())) <= 64
    assert all(rows <= to <= rows + max(7, rows // 8) for rows, to in asked.items())
    assert all(asked[to] == to for to in asked.values())
