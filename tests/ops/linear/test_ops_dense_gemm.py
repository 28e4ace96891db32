"""From tensors to the arguments of a 16-bit product's kernel: the host's part, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_cases import assert_same_bits
from ops_launches import STREAM, Launches, note_launches

from ostinato import ops
from ostinato.ops.common.pdl import pdl
from ostinato.ops.linear import dense_gemm, gemm_operands, packed_weight, tile_table, w8a8_gemm
from ostinato.ops.linear.gemm_variants import GemmTiled

BF16 = torch.bfloat16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    for module in (dense_gemm, w8a8_gemm):
        monkeypatch.setattr(module, "gpu", lambda device: ("", 132))
    return note_launches(monkeypatch, (dense_gemm,))


def call(
    launches: Launches,
    x: torch.Tensor,
    w: torch.Tensor | ops.PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    to_sample: w8a8_gemm.ToSample | None = None,
) -> dict[str, Any]:
    m, n = x.size(0), w.shape[0]
    out = torch.empty(m, n, dtype=x.dtype) if out is None else out
    data = w.data if isinstance(w, ops.PackedWeight) else w
    dense_gemm.dense_gemm(x, data, bias, n_active, out, to_sample)
    (launch,) = launches
    launches.clear()
    assert launch["out"] == out.data_ptr()
    assert (launch["m"], launch["n"], launch["k"]) == (m, n, x.size(1))
    assert (launch["x_scale"], launch["w_scale"]) == (0, 0)
    return launch


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return rows whose addresses 16 bytes divide, as those of CUDA tensors do."""
    storage = torch.zeros(rows * columns + 32, dtype=dtype)
    skipped = -storage.data_ptr() % 64 // dtype.itemsize
    x = storage[skipped : skipped + rows * columns].view(rows, columns)
    return x.copy_(torch.randn(rows, columns))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_packed_weight_is_passed_on_as_it_is(dtype: torch.dtype, launches: Launches) -> None:
    x, packed = matrix(4, 64, dtype), ops.pack_weight(matrix(40, 64, dtype))
    launch = call(launches, x, packed)
    assert (launch["w"], launch["w_stride"]) == (packed.data.data_ptr(), 0)
    assert (launch["x"], launch["x_stride"]) == (x.data_ptr(), 64)
    assert (launch["stream"], launch["pdl"], launch["out_stride"]) == (STREAM, True, 40)


def test_a_plain_weight_is_read_as_it_lies_and_without_pdl(launches: Launches) -> None:
    x, w = matrix(4, 64), matrix(40, 96)[:, 8:72]
    launch = call(launches, x, w)
    assert (launch["w"], launch["w_stride"], launch["pdl"]) == (w.data_ptr(), 96, False)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:5, 1:65],
        lambda x: x[:, :64].as_strided((5, 60), (68, 1)),
        lambda x: x[:1, :64].expand(5, -1),
        lambda x: x.as_strided((5, 64), (8, 1)),
    ],
    ids=["base", "stride", "expanded", "overlapping"],
)
def test_what_tma_cannot_read_is_copied_or_packed(
    view: Callable[[torch.Tensor], torch.Tensor],
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, torch.Tensor] = {}

    def noted(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(x: torch.Tensor) -> torch.Tensor:
            made[name] = function(x)
            return made[name]

        return wrapper

    monkeypatch.setattr(gemm_operands, "aligned_copy", noted("x", gemm_operands.aligned_copy))
    monkeypatch.setattr(packed_weight, "pack", noted("w", packed_weight.pack))
    x, w = view(matrix(8, 96)), view(matrix(8, 96))
    launch = call(launches, x, w)
    assert (launch["x"], launch["x_stride"]) == (made["x"].data_ptr(), 64)
    assert (launch["w"], launch["w_stride"], launch["pdl"]) == (made["w"].data_ptr(), 0, False)
    assert_same_bits(made["x"], x)
    assert_same_bits(packed_weight.unpack(made["w"], 5, x.size(1)), w)


def test_a_bias_of_another_dtype_is_not_read_early(launches: Launches) -> None:
    x, w, bias = matrix(4, 64), ops.pack_weight(matrix(40, 64)), torch.zeros(40).bfloat16()
    launch = call(launches, x, w, bias=bias)
    assert (launch["bias"], launch["pdl"]) == (bias.data_ptr(), True)
    out = torch.empty(4, 40)
    launch = call(launches, x, w, bias=bias, out=out)
    assert launch["bias"] not in (0, bias.data_ptr())
    assert not launch["pdl"]
    bias = bias.float()
    launch = call(launches, x, w, bias=bias, out=out)
    assert (launch["bias"], launch["pdl"]) == (bias.data_ptr(), True)


def test_the_number_of_real_rows_and_pdl_are_passed_on(launches: Launches) -> None:
    x, w, n_active = matrix(4, 64), ops.pack_weight(matrix(40, 64)), torch.tensor([3])
    assert call(launches, x, w)["n_active"] == 0
    assert call(launches, x, w, n_active=n_active)["n_active"] == n_active.data_ptr()
    with pdl(False):
        assert not call(launches, x, w)["pdl"]


@pytest.mark.parametrize("out_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 16, 17, 100, 300])
def test_the_choice_reaches_the_launch(m: int, out_dtype: torch.dtype, launches: Launches) -> None:
    x, w = matrix(m, 64), ops.pack_weight(matrix(4096, 64))
    launch = call(launches, x, w, out=torch.empty(m, 4096, dtype=out_dtype))
    names = {BF16: "bf16", torch.float32: "fp32"}
    how: dict[str, Any] = {"packed": True, "fast_accum": False, "batch_invariant": True}
    chosen = tile_table.choose(m, 4096, 64, "bf16", names[out_dtype], **how)
    assert isinstance(chosen.variant, GemmTiled)
    assert launch["variant"] == chosen.variant
    assert {name: launch[name] for name in tile_table.CUT} == chosen.cut


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, int], launches: Launches) -> None:
    m, n = shape
    out = torch.empty(shape, dtype=BF16)
    dense_gemm.dense_gemm(matrix(m, 64), matrix(n, 64), None, None, out)
    assert not launches


def test_the_best_of_logits_are_handed_over(launches: Launches) -> None:
    x, w = matrix(64, 512), ops.pack_weight(matrix(2048, 512))
    parts = w8a8_gemm.argmax_parts(x, 2048, w.data, False)
    assert parts > 0
    argmax, temperature = torch.empty(64, parts, dtype=torch.int64), torch.zeros(64)
    out = torch.empty(64, 2048)
    to_sample = w8a8_gemm.ToSample(argmax, temperature, None)
    launch = call(launches, x, w, out=out, to_sample=to_sample)
    assert (launch["best"], launch["best_stride"]) == (argmax.data_ptr(), parts)
    fewer = w8a8_gemm.ToSample(argmax[:, 1:], temperature, None)
    with pytest.raises(RuntimeError, match=r"argmax: got .* parts, expected"):
        call(launches, x, w, out=out, to_sample=fewer)
    assert not launches
