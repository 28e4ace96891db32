"""From tensors to the arguments of a W8A8 kernel: the host's part, on a machine without GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_cases import E4M3, assert_same_bits, quantized_randn
from ops_launches import STREAM, Launches, note_launches

from ostinato import ops
from ostinato.ops.common.pdl import pdl
from ostinato.ops.linear import gemm_operands, packed_weight, quantize_cuda, tile_table, w8a8_gemm
from ostinato.ops.linear.block_scales import empty_scales
from ostinato.ops.linear.gemm_variants import GemmSmallM, GemmTiled
from ostinato.ops.linear.quantize_cuda import Quantize

CPU = torch.device("cpu")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(w8a8_gemm, "gpu", lambda device: ("", 132))
    return note_launches(monkeypatch, (w8a8_gemm, quantize_cuda))


def call(
    launches: Launches,
    x: torch.Tensor,
    w: torch.Tensor | ops.PackedWeight,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> dict[str, Any]:
    m, n = x.size(0), w.shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16) if out is None else out
    scale = torch.ones(())
    given = {"bias": None, "x_zero_point": None, "w_sum": None, "n_active": None, **options}
    given = {"fast_accum": True, "batch_invariant": False, **given}
    w8a8_gemm.w8a8_gemm(
        x,
        w.data if isinstance(w, ops.PackedWeight) else w,
        scale if x_scale is None else x_scale,
        scale if w_scale is None else w_scale,
        out=out,
        **given,
    )
    (launch,) = launches
    launches.clear()
    assert launch["out"] == out.data_ptr()
    assert (launch["m"], launch["n"], launch["k"]) == (m, n, x.size(1))
    return launch


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Return rows whose addresses 16 bytes divide, as those of CUDA tensors do."""
    storage = torch.zeros(rows * columns + 64, dtype=torch.int8)
    skipped = -storage.data_ptr() % 64
    x = storage[skipped : skipped + rows * columns].view(rows, columns).view(dtype)
    x.copy_(quantized_randn((rows, columns), dtype))
    return x


def test_a_packed_weight_is_passed_on_as_it_is(launches: Launches) -> None:
    x, w = matrix(4, 64), matrix(40, 64)
    packed = ops.pack_weight(w)
    launch = call(launches, x, packed)
    assert isinstance(launch["variant"], GemmSmallM)
    assert (launch["w"], launch["w_stride"]) == (packed.data.data_ptr(), 0)
    assert (launch["x"], launch["x_stride"]) == (x.data_ptr(), 64)
    assert (launch["stream"], launch["pdl"], launch["out_stride"]) == (STREAM, True, 40)


def test_a_plain_weight_is_read_as_it_lies_and_without_pdl(launches: Launches) -> None:
    x, w = matrix(4, 64), matrix(40, 96)[:, 16:80]
    launch = call(launches, x, w)
    assert isinstance(launch["variant"], GemmTiled)
    assert (launch["w"], launch["w_stride"], launch["pdl"]) == (w.data_ptr(), 96, False)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[:, 1:65],
        lambda w: w[:, :64].as_strided((40, 64), (72, 1)),
        lambda w: w[:1, :64].expand(40, -1),
        lambda w: w.as_strided((40, 64), (16, 1)),
    ],
    ids=["base", "stride", "expanded", "overlapping"],
)
def test_a_weight_that_tma_cannot_read_is_packed_for_the_call(
    view: Callable[[torch.Tensor], torch.Tensor],
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.Tensor] = []

    def pack(w: torch.Tensor) -> torch.Tensor:
        made.append(original(w))
        return made[-1]

    original = packed_weight.pack
    monkeypatch.setattr(packed_weight, "pack", pack)
    w = view(matrix(40, 96))
    launch = call(launches, matrix(4, 64), w)
    assert (launch["w"], launch["w_stride"], launch["pdl"]) == (made[0].data_ptr(), 0, False)
    assert_same_bits(packed_weight.unpack(made[0], 40, 64), w)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, 3:], lambda x: x.as_strided((5, 61), (72, 1)), lambda x: x[:1].expand(5, -1)],
    ids=["base", "stride", "expanded"],
)
def test_an_x_that_tma_cannot_read_is_copied(
    view: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.Tensor] = []

    def aligned_copy(x: torch.Tensor) -> torch.Tensor:
        made.append(original(x))
        return made[-1]

    original = gemm_operands.aligned_copy
    monkeypatch.setattr(gemm_operands, "aligned_copy", aligned_copy)
    x = view(matrix(8, 64, dtype))
    launch = call(launches, x, ops.pack_weight(matrix(40, x.size(1), dtype)))
    assert (launch["x"], launch["x_stride"]) == (made[0].data_ptr(), 64)
    assert launch["pdl"]
    assert_same_bits(made[0], x)


def test_the_stride_of_a_single_row_does_not_matter(launches: Launches) -> None:
    x = matrix(1, 64).as_strided((1, 40), (3, 1))
    w = matrix(1, 64).as_strided((1, 40), (5, 1))
    launch = call(launches, x, w)
    assert (launch["x"], launch["x_stride"]) == (x.data_ptr(), 48)
    assert (launch["w"], launch["w_stride"]) == (w.data_ptr(), 48)


def test_scales_and_zero_points_are_vectors_or_one_element(launches: Launches) -> None:
    x, w = matrix(4, 64), ops.pack_weight(matrix(40, 64))
    zero = torch.zeros(4, dtype=torch.int32)
    sums = torch.zeros(40, dtype=torch.int32)
    options = {"x_scale": torch.ones(4), "w_scale": torch.ones(40), "w_sum": sums}
    launch = call(launches, x, w, x_zero_point=zero, **options)
    strides = ("x_scale_stride", "w_scale_stride", "x_zero_point_stride")
    assert [launch[name] for name in strides] == [1, 1, 1]
    assert (launch["x_zero_point"], launch["w_sum"]) == (zero.data_ptr(), sums.data_ptr())
    assert launch["pdl"]
    launch = call(launches, x, w, x_zero_point=zero[:1], w_scale=torch.ones(1))
    assert [launch[name] for name in strides] == [0, 0, 0]
    launch = call(launches, x, w)
    assert (launch["x_zero_point"], launch["w_sum"], launch["bias"]) == (0, 0, 0)


def test_what_was_computed_for_the_call_is_not_read_early(launches: Launches) -> None:
    x, w = matrix(4, 64), ops.pack_weight(matrix(40, 64))
    assert not call(launches, x, w, x_zero_point=torch.zeros((), dtype=torch.int32))["pdl"]
    bias = torch.zeros(40)
    launch = call(launches, x, w, bias=bias)
    assert launch["bias"] not in (0, bias.data_ptr())
    assert not launch["pdl"]
    launch = call(launches, x, w, bias=bias, out=torch.empty(4, 40))
    assert launch["bias"] == bias.data_ptr()
    assert launch["pdl"]


def test_pdl_can_be_turned_off(launches: Launches) -> None:
    x, w = matrix(4, 64), ops.pack_weight(matrix(40, 64))
    with pdl(False):
        assert not call(launches, x, w)["pdl"]
    assert call(launches, x, w)["pdl"]


def test_the_choice_reaches_the_launch(launches: Launches) -> None:
    x, w = matrix(100, 64, E4M3), ops.pack_weight(matrix(28672, 64, E4M3))
    launch = call(launches, x, w, fast_accum=False)
    assert launch["variant"] == GemmTiled(dtype="e4m3", out_dtype="bf16", channels=128, tokens=128)
    chosen = tile_table.choose(
        100, 28672, 64, "e4m3", "bf16", packed=True, fast_accum=False, batch_invariant=False
    )
    assert {name: launch[name] for name in tile_table.CUT} == chosen.cut
    launch = call(launches, x[:8], w, batch_invariant=True)
    assert isinstance(launch["variant"], GemmTiled)
    assert launch["variant"].fast_accum


def test_the_number_of_real_rows_is_passed_on(launches: Launches) -> None:
    x, w, n_active = matrix(4, 64), ops.pack_weight(matrix(40, 64)), torch.tensor([3])
    assert call(launches, x, w)["n_active"] == 0
    assert call(launches, x, w, n_active=n_active)["n_active"] == n_active.data_ptr()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, int], launches: Launches) -> None:
    m, n = shape
    x, w, out = matrix(m, 64), matrix(n, 64), torch.empty(shape)
    one = torch.ones(())
    w8a8_gemm.w8a8_gemm(x, w, one, one, None, None, None, None, True, False, out)
    quantize_cuda.quantize_rows("per_token", torch.ones(0, 8), None, None, x[:0, :8], None)
    assert not launches


def to_sample(x: torch.Tensor, n: int, w: torch.Tensor) -> w8a8_gemm.ToSample:
    parts = w8a8_gemm.argmax_parts(x, n, w, False)
    return w8a8_gemm.ToSample(
        torch.empty(len(x), parts, dtype=torch.int64), torch.zeros(len(x)), None
    )


def logits(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.empty(len(x), n)


def test_a_weight_that_is_packed_for_the_call_hands_over_what_a_packed_one_does(
    launches: Launches,
) -> None:
    x, w = matrix(11, 14526), matrix(242, 14526)
    assert w8a8_gemm.argmax_parts(x, 242, w, False) == w8a8_gemm.argmax_parts(
        x, 242, packed_weight.pack(w), False
    )
    x, w = matrix(32, 4090), matrix(500, 4090)
    argmax = to_sample(x, 500, w)
    launch = call(launches, x, w, out=logits(x, 500), to_sample=argmax)
    assert launch["best"] == argmax.argmax.data_ptr()


def test_room_for_another_number_of_parts_is_refused(launches: Launches) -> None:
    x, w = matrix(64, 512), ops.pack_weight(matrix(2048, 512))
    argmax = to_sample(x, 2048, w.data)
    call(launches, x, w, out=logits(x, 2048), to_sample=argmax)
    fewer = w8a8_gemm.ToSample(argmax.argmax[:, 1:], argmax.temperature, None)
    with pytest.raises(RuntimeError, match=r"argmax: got .* parts, expected"):
        call(launches, x, w, out=logits(x, 2048), to_sample=fewer)
    assert not launches


def test_quantization_arguments(launches: Launches) -> None:
    x, residual = torch.randn(3, 40)[:, :32], torch.randn(3, 48)[:, :32]
    weight, out = torch.ones(32), torch.empty(3, 64, dtype=torch.int8)[:, :32]
    n_active = torch.tensor([2], dtype=torch.int32)
    total, scale_out = torch.empty(3, 32), torch.empty(3)
    quantize_cuda.quantize_rows(
        "rms_norm",
        x,
        None,
        None,
        out,
        scale_out,
        residual=residual,
        residual_out=total,
        norm_weight=weight,
        eps=0.5,
        n_active=n_active,
    )
    (launch,) = launches
    assert launch == {
        "variant": Quantize(kind="rms_norm", in_dtype="fp32", out_dtype="int8"),
        "x": x.data_ptr(),
        "x_stride": 40,
        "out": out.data_ptr(),
        "out_stride": 64,
        "scale_out": scale_out.data_ptr(),
        "scale_stride": 0,
        "power_of_two": False,
        "static_scale": 0,
        "zero_point": 0,
        "residual": residual.data_ptr(),
        "residual_stride": 48,
        "residual_out": total.data_ptr(),
        "residual_out_stride": 32,
        "norm_weight": weight.data_ptr(),
        "eps": 0.5,
        "m": 3,
        "k": 32,
        "pdl": True,
        "n_active": n_active.data_ptr(),
        "discard_x": False,
        "heads": 1,
        "norm_bias": 0,
        "zero_point_out": 0,
        "stream": STREAM,
    }


def test_zero_points_of_rows_and_biases_are_passed_on(launches: Launches) -> None:
    x, weight, bias = torch.randn(3, 32), torch.ones(32), torch.ones(32)
    out, scale_out = torch.empty(3, 32, dtype=torch.int8), torch.empty(3)
    zero_point_out = torch.empty(3, dtype=torch.int32)
    quantize_cuda.quantize_rows(
        *("layer_norm", x, None, None, out, scale_out),
        zero_point_out=zero_point_out,
        norm_weight=weight,
        norm_bias=bias,
    )
    (launch,) = launches
    kind = Quantize(kind="layer_norm", in_dtype="fp32", out_dtype="int8", asymmetric=True)
    assert launch["variant"] == kind
    assert launch["zero_point_out"] == zero_point_out.data_ptr()
    assert launch["norm_bias"] == bias.data_ptr()


def test_block_scales_are_passed_on_as_they_lie_if_aligned(launches: Launches) -> None:
    x, w = matrix(5, 300 + 20, E4M3)[:, :300], ops.pack_weight(matrix(40, 300, E4M3))
    scales = {"x_scale": empty_scales(3, 5, CPU), "w_scale": empty_scales(3, 5, CPU)}
    launch = call(launches, x, w, block_scales=True, **scales)
    assert launch["variant"].block_scales
    assert not launch["variant"].fast_accum
    for name, scale in scales.items():
        assert (launch[name], launch[f"{name}_stride"]) == (scale.data_ptr(), 8)
    assert launch["pdl"]
    x, one = x[:, :100], {name: scale[:1] for name, scale in scales.items()}
    launch = call(launches, x, ops.pack_weight(w.unpack()[:, :100]), block_scales=True, **one)
    assert launch["x_scale_stride"] == 16  # of a single row, any multiple of 4 will do
    for name, early in (("x_scale", True), ("w_scale", False)):
        dense = torch.rand(3, 5)
        launch = call(launches, matrix(5, 320, E4M3)[:, :300], w, block_scales=True,
                      **{**scales, name: dense})  # fmt: skip
        assert launch[name] != dense.data_ptr()
        assert launch[f"{name}_stride"] == 8
        assert launch["pdl"] == early, "constants that were copied for the call are no constants"


def test_group_quantization_arguments(launches: Launches) -> None:
    x, out = torch.randn(3, 300).bfloat16(), torch.empty(3, 300).to(E4M3)
    scale_out = empty_scales(3, 3, CPU)
    how = {"group": 128, "power_of_two": True}
    quantize_cuda.quantize_rows("per_token", x, None, None, out, scale_out, **how)
    (launch,) = launches
    assert launch["variant"].name == "quantize-per_token-bf16-e4m3-group128"
    assert (launch["scale_out"], launch["scale_stride"]) == (scale_out.data_ptr(), 4)
    assert launch["power_of_two"]


def test_gated_and_static_quantization_arguments(launches: Launches) -> None:
    x, out = torch.randn(3, 64).half(), torch.empty(3, 32, dtype=torch.int8)
    scale, zero = torch.ones(()), torch.zeros((), dtype=torch.int32)
    quantize_cuda.quantize_rows("silu_mul", x, scale, zero, out, None)
    quantize_cuda.quantize_rows("silu_mul", x, None, None, out.view(E4M3), None, discard_x=True)
    static, dynamic = launches
    assert static["variant"] == Quantize(kind="silu_mul", in_dtype="fp16", out_dtype="int8")
    assert (static["k"], static["x_stride"]) == (32, 64)
    assert (static["static_scale"], static["zero_point"]) == (scale.data_ptr(), zero.data_ptr())
    assert (static["norm_weight"], static["n_active"]) == (0, 0)
    assert static["scale_out"] != 0  # rows' scales, which may be NaN, are always written
    assert (static["discard_x"], dynamic["discard_x"]) == (False, True)
    assert dynamic["variant"].out_dtype == "e4m3"
    assert dynamic["static_scale"] == 0
    assert dynamic["scale_out"] != 0
