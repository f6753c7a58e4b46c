"""Native layers compute what plain ones do, a row's bits whatever its company, and keep one copy
of the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm_engine.models.config import DecoderConfig
from lm_engine.models.decoder import Decoder, RMSNorm
from lm_engine.models.linear import Linear
from lm_engine.models.native_layers import (
    NativeEmbedding,
    NativeGated,
    NativeKernels,
    NativeLinear,
    NativeRMSNorm,
    can_nativize,
    nativize,
)
from lm_engine.models.rope import rotate
from lm_engine.native import library

ROWS = [0, 1, 2, 5, 6, 7, 8, 9, 33, 200]
SIZES = [(64, 192), (36, 100), (8, 8), (20, 32), (576, 960)]


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    try:
        return NativeKernels(library.load())
    except library.NativeUnavailableError as error:
        pytest.skip(str(error))


def make_linear(inputs: int, outputs: int, bias: bool) -> Linear:
    linear = Linear(inputs, outputs, bias=bias)
    torch.manual_seed(inputs)
    torch.nn.init.normal_(linear.weight)
    if linear.bias is not None:
        torch.nn.init.normal_(linear.bias)
    return linear


def close(got: Tensor, want: Tensor) -> None:
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_products(kernels: NativeKernels, bias: bool, size: tuple[int, int]) -> None:
    linear = make_linear(*size, bias)
    ours = NativeLinear(linear, kernels)
    for rows in ROWS:
        wide = torch.randn(rows, 2 * size[0])
        for x in (
            wide[:, : size[0]].contiguous(),
            wide[:, size[0] :],
            torch.randn(size[0], rows).t(),
        ):
            want = F.linear(x, linear.weight, linear.bias)
            close(ours(x), want)
            stream = torch.randn(rows, size[1])
            before = stream.clone()
            assert ours.add_to(stream, x) is stream
            close(stream, before + want)


def test_a_strided_weight_is_packed_as_it_reads(kernels: NativeKernels) -> None:
    weight = torch.randn(400, 300).t()
    assert torch.equal(kernels.pack(weight), kernels.pack(weight.contiguous()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(64, 192), (36, 100), (8, 8), (576, 3072)])
def test_gated(kernels: NativeKernels, bias: bool, size: tuple[int, int]) -> None:
    linear = make_linear(*size, bias)
    linear.weight.div_(size[0] ** 0.5)
    ours = NativeGated(linear, kernels)
    for rows in ROWS:
        x = torch.randn(rows, size[0]) * 3
        close(ours.gated(x, F.silu), linear.gated(x, F.silu))


def test_silu_far_from_zero(kernels: NativeKernels) -> None:
    """At -200 e^x is no number of float32's any more."""
    linear = Linear(8, 16)
    linear.weight.copy_(torch.eye(8).repeat(2, 1))
    x = torch.tensor([[-200.0, -80.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 200.0]])
    got, want = NativeGated(linear, kernels).gated(x, F.silu), linear.gated(x, F.silu)
    torch.testing.assert_close(got, want, atol=1e-30, rtol=2e-6)


@pytest.mark.parametrize("rows", [3, 64, 258])
def test_an_embedding_reads_its_heads_weight(kernels: NativeKernels, rows: int) -> None:
    linear = make_linear(20, rows, bias=False)
    table = NativeEmbedding(NativeLinear(linear, kernels))
    for ids in (torch.arange(rows), torch.tensor([rows - 1, 0, 0]), torch.arange(rows)[::2]):
        assert torch.equal(table(ids), linear.weight[ids])
    assert table(torch.empty(0, dtype=torch.int64)).shape == (0, 20)
    for wrong in (-1, rows):
        with pytest.raises(IndexError, match=f"the table has {rows} rows"):
            table(torch.tensor([0, wrong]))


@pytest.mark.parametrize("size", [8, 20, 64, 576])
def test_rms_norm(kernels: NativeKernels, size: int) -> None:
    norm = RMSNorm(size, 1e-5, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(norm.weight)
    ours = NativeRMSNorm(norm, kernels)
    for x in (
        torch.randn(0, size),
        torch.randn(1, size),
        torch.randn(90, size),
        torch.zeros(2, size),
    ):
        torch.testing.assert_close(ours(x), F.rms_norm(x, (size,), norm.weight, 1e-5))


@pytest.mark.parametrize("dim", [8, 20, 64])
def test_rotation(kernels: NativeKernels, dim: int) -> None:
    fused = torch.randn(90, 7, dim)
    for rows in (0, 1, 90):
        angles = torch.randn(rows, 1, dim // 2)
        cos, sin = angles.cos(), angles.sin()
        by = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        ours = fused[:rows].clone()
        want = rotate(ours[:, :5], by)
        assert kernels.rotate(ours[:, :5], by).data_ptr() == ours.data_ptr()
        torch.testing.assert_close(ours[:, :5], want)
        assert torch.equal(ours[:, 5:], fused[:rows, 5:])


def test_company_and_threads_change_no_bit(kernels: NativeKernels) -> None:
    linear, norm = make_linear(96, 320, True), RMSNorm(96, 1e-5, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(norm.weight)
    layers = {
        "linear": NativeLinear(linear, kernels),
        "norm": NativeRMSNorm(norm, kernels),
    }
    gated = NativeGated(linear, kernels)
    calls: dict[str, Any] = {**layers, "gated": lambda x: gated.gated(x, F.silu)}
    x = torch.randn(300, 96)
    before = torch.get_num_threads()
    try:
        for name, call in calls.items():
            torch.set_num_threads(1)
            whole = call(x)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                for start, end in ((0, 1), (3, 5), (7, 16), (20, 32), (0, 300)):
                    assert torch.equal(call(x[start:end]), whole[start:end]), name
    finally:
        torch.set_num_threads(before)


def make_decoder(*, tied: bool, activation: str = "silu") -> Decoder:
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
            "hidden_act": activation,
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
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_native_decoder_answers_alike(
    kernels: NativeKernels, tied: bool, activation: str
) -> None:
    plain = make_decoder(tied=tied, activation=activation)
    native = nativize(copy.deepcopy(plain), library.load())
    assert not any(isinstance(module, Linear | RMSNorm) for module in native.modules())
    assert tied == isinstance(native.embedding, NativeEmbedding)
    for rows in (1, 2, 5, 40):
        torch.testing.assert_close(run(native, rows), run(plain, rows), atol=2e-5, rtol=0)


def test_one_copy_of_the_weights_is_kept(kernels: NativeKernels) -> None:
    decoder = nativize(make_decoder(tied=True), library.load())
    assert all(parameter.ndim == 1 for parameter in decoder.parameters())
    assert decoder.head.packed is decoder.embedding._packed


def test_other_types_are_left_alone(kernels: NativeKernels) -> None:
    decoder = make_decoder(tied=True).bfloat16()
    assert not can_nativize(decoder)
    with pytest.raises(ValueError, match=r"not torch\.bfloat16 cpu"):
        nativize(decoder, library.load())
