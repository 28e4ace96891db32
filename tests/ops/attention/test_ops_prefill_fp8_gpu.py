"""FP8 prefill attention by our kernel: accuracy, NaN, repeats."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from fp8_sums import tensor_core_dots
from ops_cases import assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.attention import prefill_cuda
from ostinato.ops.attention.prefill_cuda import Fp8Scales
from ostinato.ops.attention.softmax_torch import LogitRule

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

CUDA = torch.device("cuda")
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# Around the tiles of queries and keys.
Q_LENS = (0, 1, 5, 63, 64, 65, 95, 96, 97, 127, 128, 129, 0, 200)
K_LENS = (7, 0, 300, 64, 65, 64, 96, 97, 300, 128, 127, 500, 9, 201)
RULES: list[dict[str, Any]] = [
    *(
        {"scale": 0.3},
        {"scale": -0.1},
        {"softcap": 5.0},
        {"softcap": 1e6},
        {"sinks": True},
        {"causal": False},
    ),
    *({"window": window} for window in [(0, 0), (30, -1), (130, -1), (5000, -1), (-1, 2)]),
    {"window": (50, 40), "causal": False, "softcap": 15.0, "sinks": True},
]
# How each head dim is multiplied; of 128, by two warpgroups and by three.
KERNELS = [{"dim": 64}, {"dim": 128}, {"dim": 128, "warpgroups": 3}, {"dim": 256}]
# Long sums differ: added in fp32 with each tile, or put aside after 16 tiles of 96 keys.
LONG = [{"dim": 128}, {"dim": 128, "warpgroups": 3}, {"dim": 256}]
each_long = pytest.mark.parametrize("kernel", LONG, ids=str)
# Around one and two tiles of 96 keys; and where sums are put aside for the first time, and for the
# second, when they are added to what lies there.
EDGES = (95, 96, 97, 191, 192, 193)
ASIDE_EDGES = (1535, 1536, 1537, 1632, 1633, 3071, 3072, 3073, 3168, 3169)


def puts_aside(kernel: dict[str, int]) -> bool:
    return kernel["dim"] == 256 or kernel.get("warpgroups") == 3


class Case:
    """Packed FP8 tensors, followed by rows of NaN that no sequence owns, and a launch of them."""

    def __init__(
        self,
        q_lens: tuple[int, ...] = Q_LENS,
        k_lens: tuple[int, ...] | None = None,
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 128,
        out_dtype: torch.dtype = BF16,
        warpgroups: int = 0,
        **rule: Any,
    ) -> None:
        k_lens = q_lens if k_lens is None else k_lens
        self.lens = (q_lens, k_lens)
        self.tensors = []
        for lens, count in ((q_lens, heads[0]), (k_lens, heads[1]), (k_lens, heads[1])):
            rows = torch.full((sum(lens) + 3, 2 * count, dim), math.nan, device=CUDA)
            rows[: sum(lens), :count] = 24 * torch.randn(sum(lens), count, dim, device=CUDA)
            self.tensors.append(rows.to(E4M3)[:, :count])
        self.tensors[0] = self.tensors[0][: sum(q_lens)]
        self.offsets = [
            int32([sum(lens[:b]) for b in range(len(lens) + 1)], CUDA) for lens in self.lens
        ]
        each = 1 + 0.1 * torch.arange(heads[1], device=CUDA)
        self.scales = Fp8Scales(torch.full((), 1 / 24, device=CUDA), each / 24, each.flip(0) / 24)
        if rule.pop("sinks", False):
            rule["sinks"] = torch.randn(heads[0], device=CUDA)
        self.rule = rule
        self.out_dtype = out_dtype
        self.warpgroups = warpgroups

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.tensors
        out = torch.full(q.shape, math.nan, dtype=self.out_dtype, device=CUDA)
        lse = torch.full(q.shape[:2], math.nan, device=CUDA)
        kernel = prefill_cuda.fp8_variant(q, k, v, out, self.scales)
        assert kernel is not None
        kernel = replace(kernel, warpgroups=self.warpgroups)
        rule = {"causal": True, "softcap": 0.0, "scale": q.size(2) ** -0.5, **self.rule}
        left, right = rule.get("window", (-1, -1))
        prefill_cuda.attend_packed(
            kernel,
            *(q, k, v, *self.offsets),
            *(max(1, *lens) for lens in self.lens),
            LogitRule(rule["scale"], rule["causal"], left, right, rule["softcap"]),
            rule.get("sinks"),
            out,
            lse,
            None,
            self.scales,
        )
        return out, lse

    def twin(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        scales = {f"{name}_scale": scale for name, scale in self.scales._asdict().items()}
        return reference.varlen_attention(
            *self.tensors, *self.offsets, **scales, **self.rule, dtype=dtype
        )

    def logit_errors(self) -> torch.Tensor:
        """Return, [total_q, heads_q], the most that the tensor cores' sums are off in a row.

        That is of its logits for all keys of its sequence. A cap makes it no greater.
        """
        q, k, _ = self.tensors
        found = torch.zeros(q.shape[:2], dtype=torch.float64, device=CUDA)
        group = q.size(1) // k.size(1)
        q_ends, k_ends = ([0, *itertools.accumulate(lens)] for lens in self.lens)
        for b, head in itertools.product(range(len(q_ends) - 1), range(q.size(1))):
            rows, keys = slice(*q_ends[b : b + 2]), slice(*k_ends[b : b + 2])
            left, right = q[rows, head], k[keys, head // group]
            if len(left) and len(right):
                off = tensor_core_dots(left, right) - left.double() @ right.double().T
                of_head = self.scales.q.item() * self.scales.k[head // group].item()
                found[rows, head] = off.abs().amax(1) * of_head
        return found * abs(self.rule.get("scale", q.size(2) ** -0.5))

    def check(self) -> None:
        """Demand the accuracy of weights of 4 bits and of the tensor cores' scores.

        Rounding such a weight is off by up to 1/16 of it, and by less than 1/28 in quadratic mean.
        LSE is off by no more than the logits that it is made of, and a weight by twice as much;
        half of that for each of the logit and LSE, which are off independently.
        """
        out, lse = self.attend()
        exact, exact_lse = self.twin(torch.float64)
        error = (out.double() - exact).abs()
        magnitude = exact.square().mean().sqrt()
        off = self.logit_errors()
        rounding = 1 / 28 + off.square().mean().sqrt()
        assert error.square().mean().sqrt() <= rounding * magnitude + 1e-3
        assert error.amax() <= magnitude
        lse_error = torch.where(exact_lse.isinf(), 0.0, (lse.double() - exact_lse).abs())
        assert torch.equal(lse.isinf(), exact_lse.isinf())
        assert (lse_error <= off + 1e-5 * (1 + exact_lse.nan_to_num(neginf=0.0).abs())).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("codes", [1, 24, 150])
def test_scores_are_those_of_the_tensor_cores(codes: int, kernel: dict[str, int]) -> None:
    """With one key LSE is the logit."""
    case = Case((100,) * 8, (1,) * 8, **kernel, causal=False, scale=2.0**-12)
    case.scales = Fp8Scales(*(torch.ones((), device=CUDA) for _ in "qkv"))
    q, k, _ = case.tensors
    q.copy_((codes * torch.randn(q.shape, device=CUDA)).clamp(-440, 440).to(E4M3))
    _, lse = case.attend()
    scores = torch.stack(
        [
            tensor_core_dots(q[100 * b : 100 * (b + 1), head], k[b : b + 1, head // 2])
            for b, head in itertools.product(range(8), range(4))
        ]
    )
    expected = scores.view(8, 4, 100).transpose(1, 2).reshape(800, 4) * 2.0**-12
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("out_dtype", [BF16, FP16])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("k_lens", [None, K_LENS], ids=["all", "chunks"])
def test_dims_and_dtypes(
    k_lens: tuple[int, ...] | None, kernel: dict[str, int], out_dtype: torch.dtype
) -> None:
    Case(k_lens=k_lens, **kernel, out_dtype=out_dtype).check()


def test_the_op_gives_the_bits_of_a_launch() -> None:
    case = Case()
    scales = {f"{name}_scale": scale for name, scale in case.scales._asdict().items()}
    most = [max(1, *lens) for lens in case.lens]
    got = ops.varlen_attention(*case.tensors, *case.offsets, *most, **scales)
    expected, _ = case.attend()
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (32, 8), (8, 8), (12, 1)], ids=str)
@pytest.mark.parametrize("q_lens", [(300, 20, 1), (40, 9)], ids=str)
def test_groups(q_lens: tuple[int, ...], heads: tuple[int, int], dim: int) -> None:
    Case(q_lens, heads=heads, dim=dim).check()


@pytest.mark.parametrize("rule", [{}, {"causal": False}, {"window": (95, -1)}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_edges_of_tiles(kernel: dict[str, int], rule: dict[str, Any]) -> None:
    Case(EDGES, **kernel, **rule).check()
    Case((129,) * len(EDGES), EDGES, **kernel, **rule).check()


@each_long
@pytest.mark.parametrize("rule", [{}, {"causal": False}, {"window": (1632, -1)}], ids=str)
def test_edges_of_what_is_put_aside(rule: dict[str, Any], kernel: dict[str, int]) -> None:
    Case((65,) * len(ASIDE_EDGES), ASIDE_EDGES, **kernel, **rule).check()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_rules(kernel: dict[str, int], rule: dict[str, Any]) -> None:
    Case((300, 129, 64), (310, 500, 64), **kernel, **rule).check()


@each_long
@pytest.mark.parametrize("rule", [*RULES, {"window": (2200, -1)}], ids=str)
def test_rules_where_sums_are_put_aside(rule: dict[str, Any], kernel: dict[str, int]) -> None:
    Case((300, 129, 1), (2500, 1900, 3100), **kernel, **rule).check()


@each_long
@pytest.mark.parametrize("scale", [0.8, 2.0, -2.0])
def test_scores_far_above_all_before(scale: float, kernel: dict[str, int]) -> None:
    Case((300, 70), (900, 400), scale=scale, **kernel).check()


@each_long
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("later", ["greater", "smaller"])
def test_references_that_rise_far_after_sums_were_put_aside(
    later: str, causal: bool, kernel: dict[str, int]
) -> None:
    """Scores from about 0 to 400: sums relative to the first reference would be infinite."""
    scale = 0.4 * 128 / kernel["dim"]
    case = Case((200,), (3000,), heads=(2, 1), scale=scale, causal=causal, **kernel)
    q, k, _ = case.tensors
    slope = torch.linspace(0, 1, 3000, device=CUDA)
    slope = slope if later == "greater" else slope.flip(0)
    q.copy_(q.float().abs().to(E4M3))
    greater = k[:3000].float().abs() * 12 * slope[:, None, None]
    k[:3000] = greater.clamp(max=448).to(E4M3)  # above it would be NaN
    case.check()


@each_long
def test_a_mean_of_values_is_not_cut_off(kernel: dict[str, int]) -> None:
    """Tensor cores that sum all keys are off by a fifth, those of 1536 by 8e-3."""
    case = Case((64,), (32768,), heads=(2, 1), causal=False, scale=0.02, **kernel)
    v = case.tensors[2]
    v[:32768] = (v[:32768].float() + 12).to(E4M3)
    out, _ = case.attend()
    exact, _ = case.twin(torch.float64)
    error = (out.double() - exact).square().mean().sqrt()
    assert error <= (1.2e-2 if puts_aside(kernel) else 4e-3) * exact.square().mean().sqrt()


@each_long
@pytest.mark.parametrize("keys", [4096, 131072])
def test_ones_of_equal_weights_sum_to_one(keys: int, kernel: dict[str, int]) -> None:
    case = Case((128,), (keys,), heads=(2, 1), causal=False, **kernel)
    q, k, v = case.tensors
    for x, value in ((q, 0.0), (k[:keys], 0.0), (v[:keys], 1.0)):
        x.copy_(torch.full_like(x, value))
    case.scales = Fp8Scales(*(torch.ones((), device=CUDA) for _ in "qkv"))
    out, _ = case.attend()
    assert_same_bits(out, torch.ones_like(out))


@each_long
def test_long_sequences_beside_short_ones(kernel: dict[str, int]) -> None:
    Case((2500, 1, 777, 0, 64), heads=(8, 2), **kernel).check()


@each_long
def test_what_is_small_beside_the_sum_is_not_lost(kernel: dict[str, int]) -> None:
    """128 keys outweigh all others; the tensor cores alone would cut off what these add.

    They do with those that they sum together with the 128 before they are put aside: 1408 of
    19872, 2.7% of the mean.
    """
    case = Case((130,), (20000,), heads=(2, 1), causal=False, **kernel)
    q, k, v = case.tensors
    for x in (q, k[:20000]):
        x.copy_(torch.zeros_like(x))
    v[:20000] = torch.full_like(v[:20000], 2.0**-8)
    v[:128] = torch.ones_like(v[:128])
    case.scales = Fp8Scales(*(torch.ones((), device=CUDA) for _ in "qkv"))
    out, lse = case.attend()
    mean = (128 + 19872 * 2.0**-8) / 20000
    rtol = 4e-2 if puts_aside(kernel) else 4e-3
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), mean), rtol=rtol, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(20000)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("where", [1, 2], ids=["k", "v"])
@pytest.mark.parametrize("before", [0, 1000])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_nan_reaches_only_those_that_see_it(
    kernel: dict[str, int], before: int, where: int
) -> None:
    case = Case((200, 100), (before + 330, 100), heads=(2, 1), **kernel)
    expected, _ = case.attend()
    first = 270 - (330 - 200)  # the query that stands there
    key = before + 270  # of the first sequence
    case.tensors[where][key] = torch.full_like(case.tensors[where][key], math.nan)
    out, _ = case.attend()
    assert not out[first:200].isfinite().any()
    torch.testing.assert_close(out[:first], expected[:first], rtol=0.1, atol=0.1)
    assert_same_bits(out[200:], expected[200:])


@each_long
def test_nan_that_all_see_reaches_all_when_it_was_put_aside(kernel: dict[str, int]) -> None:
    case = Case((200, 100), (2000, 2000), heads=(2, 1), **kernel)
    expected, _ = case.attend()
    case.tensors[2][100] = torch.full_like(case.tensors[2][100], math.nan)
    out, _ = case.attend()
    assert out[:200].isnan().all()
    assert_same_bits(out[200:], expected[200:])


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_hundreds_of_repeats_give_the_same_bits(kernel: dict[str, int]) -> None:
    case = Case((2048, 30, 700, 1300), heads=(16, 4), **kernel)
    expected, expected_lse = case.attend()
    for _ in range(300):
        out, lse = case.attend()
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_whether_a_reference_rises_depends_on_no_other_row(kernel: dict[str, int]) -> None:
    """Scores that are just high enough for it, or just not, beside a row whose reference rises.

    Each head has its own first and second keys, and a scale by which the second ones' scores are
    where they barely fit beside the first ones', up to some units in the last place.
    """
    heads, dim, half = 64, kernel["dim"], 192
    generator = torch.Generator().manual_seed(1)
    codes = torch.tensor([m / 8 * 2.0**e for e in range(4) for m in range(8, 16)])
    offsets = [int32([0, 1, 2], CUDA), int32([0, 2 * half, 2 * half + 1], CUDA)]
    rule = LogitRule(dim**-0.5, False, -1, -1, 0.0)
    one = torch.ones((), device=CUDA)
    v = torch.zeros(2 * half + 1, heads, dim, device=CUDA)
    v[:half] = 1
    for _ in range(40):
        pairs = torch.stack([torch.randperm(32, generator=generator)[:2] for _ in range(heads)])
        first, second = codes[pairs].sort(dim=1).values.unbind(1)
        # A reference lies 7 below the greatest score, in powers of 2, and 8.75 above it still fit.
        factor = 1.75 / (second - first) / (rule.scale * math.log2(math.e))
        ulps = torch.randint(-8, 9, (heads,), generator=generator, dtype=torch.int32)
        factor = (factor.view(torch.int32) + ulps).view(torch.float32)
        k = torch.zeros(2 * half + 1, heads, dim)
        k[:half, :, 0], k[half:, :, 0] = second, first  # the last are looked at first
        found = []
        for other in (0.0, 2.0):
            q = torch.zeros(2, heads, dim)
            q[0, :, 0], q[1, :, 0] = 1, other
            out = torch.full(q.shape, math.nan, dtype=BF16, device=CUDA)
            tensors = [tensor.to(CUDA).to(E4M3) for tensor in (q, k, v)]
            scales = Fp8Scales(one, factor.to(CUDA), one)
            chosen = prefill_cuda.fp8_variant(*tensors, out, scales)
            assert chosen is not None
            chosen = replace(chosen, warpgroups=kernel.get("warpgroups", 0))
            lens = (1, 2 * half)
            prefill_cuda.attend_packed(
                chosen, *tensors, *offsets, *lens, rule, None, out, None, None, scales
            )
            found.append(out[0])
        assert_same_bits(*found)
