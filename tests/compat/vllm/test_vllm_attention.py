"""The attention backend: what it says of itself, and what it computes in vLLM's caches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.worker.utils import clear_layer_kv_caches
from vllm_batches import (
    BF16,
    CACHES,
    DIM,
    HEADS,
    HEADS_KV,
    LAYOUTS,
    common_of,
    config_of,
    empty_cache,
    layer_of,
    naive_attention,
    spec_of,
)
from vllm_layers import relative_error

from ostinato.compat.vllm.attention_backend import OstinatoAttentionBackend
from ostinato.compat.vllm.attention_impl import OstinatoAttentionImpl
from ostinato.compat.vllm.attention_metadata import OstinatoMetadataBuilder

pytestmark = pytest.mark.usefixtures("hopper")
# Sequences of (queries, keys): decodes alone, prompts alone, both, and chunks of prompts.
BATCHES = {
    "decode": [(1, 1), (1, 40), (1, 17)],
    "prompts": [(20, 20), (5, 37)],
    "mixed": [(1, 33), (1, 5), (18, 18), (3, 50)],
}
TOLERANCE = {"auto": 0.01, "fp8": 0.06, "int8_per_token_head": 0.02, "fp8_per_token_head": 0.05}


class Case:
    """A layer with its cache, and sequences whose last tokens are a step's queries."""

    def __init__(
        self,
        lens: Sequence[tuple[int, int]],
        device: torch.device,
        kv_cache_dtype: str = "auto",
        layout: KVCacheLayout = LAYOUTS[0],
        **impl: Any,
    ) -> None:
        self.q_lens, self.k_lens = [q for q, _ in lens], [k for _, k in lens]
        self.cache = empty_cache(kv_cache_dtype, layout, 32, device)
        self.layer = layer_of(self.cache)
        pages = torch.randperm(32, device=device)[: 6 * len(lens)]
        self.table = pages.view(len(lens), 6).to(torch.int32)
        self.keys, self.values = (
            [torch.randn(k, HEADS_KV, DIM, device=device).to(BF16) for k in self.k_lens]
            for _ in range(2)
        )
        self.impl = OstinatoAttentionImpl(
            HEADS, DIM, DIM**-0.5, HEADS_KV, kv_cache_dtype=kv_cache_dtype, **impl
        )
        self.impl.process_weights_after_loading(BF16)
        self.builder = OstinatoMetadataBuilder(
            spec_of(kv_cache_dtype), [], config_of(device), device
        )

    def write(self, first: Sequence[int], last: Sequence[int]) -> None:
        """Write the tokens from `first` to `last` of each sequence, as vLLM does."""
        slots = common_of(
            [b - a for a, b in zip(first, last, strict=True)], last, self.table
        ).slot_mapping
        rows = [
            torch.cat([x[a:b] for x, a, b in zip(xs, first, last, strict=True)])
            for xs in (self.keys, self.values)
        ]
        self.impl.do_kv_cache_update(self.layer, *rows, self.cache, slots)

    def run(self, *, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries of the step and the output, with rows of padding at its end."""
        before = [k - q for q, k in zip(self.q_lens, self.k_lens, strict=True)]
        self.write([0] * len(before), before)
        self.write(before, self.k_lens)
        device = self.cache.device
        tokens = sum(self.q_lens) + padding
        q = torch.randn(tokens, HEADS, DIM, device=device).to(BF16)
        output = torch.full_like(q, 7)
        metadata = self.builder.build(0, common_of(self.q_lens, self.k_lens, self.table))
        got = self.impl.forward(self.layer, q, None, None, self.cache, metadata, output)
        assert got is output
        return q, output

    def expected(self, q: torch.Tensor, **rule: Any) -> torch.Tensor:
        """Return naive attention of each sequence."""
        parts = q[: sum(self.q_lens)].split(self.q_lens)
        return torch.cat(
            [
                naive_attention(*qkv, **rule)
                for qkv in zip(parts, self.keys, self.values, strict=True)
            ]
        )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kv_cache_dtype", CACHES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_attention_equals_naive_attention(
    batch: str, kv_cache_dtype: str, layout: KVCacheLayout, device: torch.device
) -> None:
    case = Case(BATCHES[batch], device, kv_cache_dtype, layout)
    q, output = case.run(padding=2)
    rows = sum(case.q_lens)
    assert relative_error(output[:rows], case.expected(q)) < TOLERANCE[kv_cache_dtype]
    assert (output[rows:] == 7).all()


@pytest.mark.parametrize("batch", BATCHES)
def test_windows_sinks_and_softcap_count(batch: str, device: torch.device) -> None:
    sinks = torch.randn(HEADS, device=device).to(BF16)
    case = Case(BATCHES[batch], device, sliding_window=7, logits_soft_cap=2.0, sinks=sinks)
    q, output = case.run()
    expected = case.expected(q, window=7, softcap=2.0, sinks=sinks)
    assert relative_error(output, expected) < TOLERANCE["auto"]


def test_layouts_give_the_same_bits(device: torch.device) -> None:
    outputs = []
    for layout in KVCacheLayout:
        torch.manual_seed(1)
        outputs.append(Case(BATCHES["mixed"], device, "int8_per_token_head", layout).run()[1])
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])


def test_writing_leaves_other_slots_alone(device: torch.device) -> None:
    case = Case(BATCHES["mixed"], device, "fp8_per_token_head")
    before = case.cache.clone()
    case.run()
    written = torch.zeros(32, 16, dtype=torch.bool)
    for b, keys in enumerate(case.k_lens):
        for at in range(keys):
            written[int(case.table[b, at // 16]), at % 16] = True
    same = (before == case.cache).all(3).all(1).cpu()
    assert torch.equal(same, ~written)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("kv_cache_dtype", CACHES)
def test_fused_update_equals_rotation_and_update(
    is_neox: bool, kv_cache_dtype: str, device: torch.device
) -> None:
    case, apart = (Case([(5, 5)], device, kv_cache_dtype) for _ in range(2))
    apart.cache.copy_(case.cache)
    apart.table = case.table
    slots = common_of([5], [5], case.table).slot_mapping
    q, k, v = (torch.randn(5, h, DIM, device=device).to(BF16) for h in (HEADS, HEADS_KV, HEADS_KV))
    positions = torch.tensor([3, 0, 9, 1, 2], device=device)
    angles = torch.rand(16, DIM // 2, device=device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(BF16)
    rotated = [rotate(x, cos_sin.float()[positions], is_neox).to(BF16) for x in (q, k)]
    apart.impl.do_kv_cache_update(apart.layer, rotated[1], v, apart.cache, slots)
    flat = q.clone().view(5, -1)
    case.impl.do_rope_and_kv_cache_update(
        *(case.layer, flat, k, v, positions, cos_sin, is_neox, case.cache, slots)
    )
    assert case.impl.fused_rope_kvcache_supported()
    assert relative_error(flat.view_as(q), rotated[0]) < 0.01
    views, expected = (c.impl._views(c.layer, c.cache) for c in (case, apart))
    at = slots // 16, slots % 16
    for x, y in zip(views[:2], expected[:2], strict=True):
        assert relative_error(x[at].float(), y[at].float()) < 0.04


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate heads [tokens, heads, dim] by angles [tokens, dim]."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, 2)
    x = x.float()
    first, second = x.chunk(2, 2) if is_neox else (x[..., ::2], x[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    return torch.cat(pair, 2) if is_neox else torch.stack(pair, 3).flatten(2)


def test_a_run_that_measures_memory_gives_zeros() -> None:
    case = Case([(1, 1)], torch.device("cpu"))
    output = torch.full((3, HEADS, DIM), torch.nan)
    none = torch.tensor([])
    case.impl.forward(case.layer, output, None, None, none, None, output)
    assert (output == 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alibi_slopes": [1.0]}, r"alibi_slopes: got a list, expected None"),
        ({"attn_type": AttentionType.ENCODER}, r"attn_type: got .*, expected 'decoder'"),
        ({"sinks": torch.ones(3)}, r"sinks: got shape \[3\], expected \[4\]"),
    ],
)
def test_what_is_not_served_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OstinatoAttentionImpl(HEADS, DIM, 1.0, HEADS_KV, **given)


def test_quantised_outputs_are_refused() -> None:
    case = Case([(1, 1)], torch.device("cpu"))
    x = torch.zeros(1, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="output_scale"):
        case.impl.forward(case.layer, x, None, None, case.cache, None, x, x)


def test_a_cache_of_another_content_is_refused() -> None:
    case = Case([(1, 1)], torch.device("cpu"))
    wrong = torch.zeros(2, HEADS_KV, 16, DIM, dtype=BF16)
    with pytest.raises(
        ValueError, match="kv_cache: got 128 bytes of a token and head, expected 256"
    ):
        case.impl._views(case.layer, wrong)


def test_caches_are_freed_where_vllm_lets_go_of_them() -> None:
    case = Case([(1, 1)], torch.device("cpu"))
    case.run()
    storage = weakref.ref(case.cache.untyped_storage())
    layer = SimpleNamespace(kv_cache=case.cache, impl=case.impl)
    case.cache = torch.tensor([])
    clear_layer_kv_caches([layer])
    assert storage() is None


def reasons(**given: Any) -> list[str]:
    """Return why vLLM would not take the backend; by default it would."""
    from vllm.platforms.interface import DeviceCapability

    asked: dict[str, Any] = {
        "head_size": 128,
        "dtype": BF16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER,
        "has_sliding_window": True,
    }
    return OstinatoAttentionBackend.validate_configuration(**asked | given)


@pytest.mark.parametrize("kv_cache_dtype", [*CACHES, "fp8_e4m3", "bfloat16", None])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_vllm_takes_the_backend(kv_cache_dtype: str | None, head_size: int) -> None:
    assert reasons(kv_cache_dtype=kv_cache_dtype, head_size=head_size) == []


def test_vllm_is_told_what_is_not_served() -> None:
    from vllm.platforms.interface import DeviceCapability

    ampere = DeviceCapability(8, 0)
    assert reasons(device_capability=ampere) == ["compute capability not supported"]
    assert reasons(head_size=72)[0] == "head_size not supported"
    assert reasons(block_size=8) == ["block_size not supported"]
    assert reasons(kv_cache_dtype="fp8_e5m2")[0] == "kv_cache_dtype not supported"
    assert reasons(kv_cache_dtype="float16")[0].startswith("a float16 cache needs queries of")
    assert reasons(attn_type=AttentionType.ENCODER) != []
    assert reasons(use_adaptive_verification=True) != []
    assert reasons(use_non_causal=True) != []
    assert reasons(use_dcp=True) != []


@pytest.mark.parametrize(
    ("chunked", "prefix", "invariant"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_batch_invariance_is_declared_where_prompts_stay_whole(
    chunked: bool, prefix: bool, invariant: bool
) -> None:
    config = config_of(torch.device("cpu"))
    config.scheduler_config.enable_chunked_prefill = chunked
    config.cache_config.enable_prefix_caching = prefix
    with set_current_vllm_config(config):
        assert (reasons(use_batch_invariant=True) == []) is invariant
        config.speculative_config = SimpleNamespace()
        assert reasons(use_batch_invariant=True) != []
