"""Which variants exist, and how they are selected."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from ostinato.jit.registry import families, select
from ostinato.jit.sources import read_sources
from ostinato.jit.variant import Variant
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.attention.decode_variants import AttentionDecode
from ostinato.ops.attention.dequantize_kv import DequantizeKV
from ostinato.ops.attention.merge_states import MergeStates
from ostinato.ops.attention.prefill_variants import AttentionPrefill
from ostinato.ops.catalogue import CATALOGUE
from ostinato.ops.embed import Embed
from ostinato.ops.linear.fused_cuda import ActivatedLinear, FusedLinear
from ostinato.ops.linear.gemm_variants import GemmSmallM, GemmTiled
from ostinato.ops.linear.quantize_cuda import QUANTIZE_KINDS, Quantize
from ostinato.ops.sampling.sample_cuda import Sample

_QUANTIZE = {"kind": "rms_norm", "in_dtype": "bf16", "out_dtype": "int8"}
_SMALL = {"out_dtype": "bf16", "max_m": 16}
_TILED = {"dtype": "int8", "out_dtype": "bf16", "channels": 128, "tokens": 128}
_APPEND = {"dtype": "bf16", "cache_dtype": "int8"}
_FUSED = {
    "kind": "rms_norm",
    "in_dtype": "bf16",
    "out_dtype": "bf16",
    "max_k": 4096,
}
_DEQUANTIZE = {"dtype": "bf16", "kv_dtype": "int8"}
_PREFILL = {"dtype": "bf16", "head_dim": 192}
_PREFILL_FP8 = {"dtype": "e4m3", "out_dtype": "bf16", "head_dim": 128}


def test_names_and_macros_are_unique_in_the_catalogue() -> None:
    assert len({variant.name for variant in CATALOGUE}) == len(CATALOGUE)
    macros = {(v.source, *sorted(v.defines().items())) for v in CATALOGUE}
    assert len(macros) == len(CATALOGUE)


def test_names_are_fit_for_files_and_command_lines() -> None:
    for variant in CATALOGUE:
        assert set(variant.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-"), variant
        assert variant.name.startswith(f"{variant.family}-"), variant


_MACRO = re.compile(r"\bOSTINATO_[A-Z][A-Z_]*\b")
_DEFINITION = re.compile(r"^#define (OSTINATO_[A-Z][A-Z_]*)\b", re.MULTILINE)


@pytest.mark.parametrize(
    "variant",
    [
        *(Quantize(**_QUANTIZE), GemmSmallM(**_SMALL), GemmTiled(**_TILED), AppendKV(**_APPEND)),
        FusedLinear(**_FUSED),
        ActivatedLinear(out_dtype="bf16"),
        Embed(dtype="bf16"),
        MergeStates(dtype="bf16"),
        Sample(dtype="bf16"),
        AttentionPrefill(**_PREFILL),
    ],
    ids=lambda variant: variant.family,
)
def test_a_variant_gives_its_source_the_macros_that_it_asks_for(variant: Variant) -> None:
    texts = read_sources(variant.source).texts
    common = {name for name in texts if name.startswith("common/")}
    known = set(_MACRO.findall("".join(texts[name] for name in common)))
    own = "".join(texts[name] for name in texts.keys() - common)
    known.update(_DEFINITION.findall(own), {"OSTINATO_DELAY", "OSTINATO_PRINT"})
    assert set(variant.defines()) == set(_MACRO.findall(own)) - known


def test_a_name_tells_every_field_apart() -> None:
    tiled = [
        GemmTiled(**_TILED),
        GemmTiled(**{**_TILED, "out_dtype": "fp16"}),
        GemmTiled(**{**_TILED, "channels": 256}),
        GemmTiled(**{**_TILED, "tokens": 64}),
        GemmTiled(**_TILED, pingpong=True),
        GemmTiled(**{**_TILED, "dtype": "e4m3"}),
        GemmTiled(**{**_TILED, "dtype": "e4m3"}, fast_accum=True),
    ]
    assert len({variant.name for variant in tiled}) == len(tiled)
    assert Quantize(**_QUANTIZE).name != Quantize(**_QUANTIZE, weight_dtype="fp32").name


def test_rows_keep_their_dtype_only_where_something_is_done_to_them() -> None:
    for kind in ("rms_norm", "silu_mul"):
        variant = Quantize(kind=kind, in_dtype="fp16", out_dtype="fp16")
        assert variant in CATALOGUE
        assert variant.name == f"quantize-{kind}-fp16-fp16"
        with pytest.raises(ValueError, match="out_dtype: got 'bf16', expected 'int8' or"):
            Quantize(kind=kind, in_dtype="fp16", out_dtype="bf16")
    with pytest.raises(ValueError, match="out_dtype: got 'fp16', expected 'int8' or 'e4m3'"):
        Quantize(kind="per_token", in_dtype="fp16", out_dtype="fp16")


def test_the_norm_weight_has_the_input_dtype_unless_told() -> None:
    assert Quantize(**_QUANTIZE) == Quantize(**_QUANTIZE, weight_dtype="bf16")


def test_values_have_the_dim_of_the_keys_unless_told() -> None:
    assert AttentionPrefill(**_PREFILL) == AttentionPrefill(**_PREFILL, value_dim=192)
    narrow = AttentionPrefill(**_PREFILL, value_dim=128, keys="slots")
    assert narrow.name == "attention_prefill-bf16-d192v128-slots"
    assert narrow.defines()["OSTINATO_VALUE_DIM"] == "128"


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_tiles_of_prefill_fit_in_shared_memory_and_registers(dim: int) -> None:
    widest = AttentionPrefill.widest_values(dim)
    assert widest >= dim
    for value_dim in range(16, widest + 1, 16):
        macros = AttentionPrefill(dtype="bf16", head_dim=dim, value_dim=value_dim).defines()
        keys, warpgroups = int(macros["OSTINATO_KEYS"]), int(macros["OSTINATO_CONSUMERS"])
        strips, value_strips = -(-dim // 64), -(-value_dim // 64)
        # An output takes the place of its queries, unless it is larger.
        outputs = value_strips if value_strips > strips else 0
        rows = warpgroups * (strips + outputs) * 64 * 128
        assert rows + 2 * (strips + value_strips) * keys * 128 <= 213 * 1024
        assert keys // 2 + keys // 4 + value_dim // 2 + 32 <= {2: 232, 3: 160}[warpgroups]


def test_prefill_of_head_dim_128_has_tiles_of_two_sizes() -> None:
    for keys in ("packed", "pages"):
        kernel = AttentionPrefill(dtype="bf16", head_dim=128, keys=keys, warpgroups=3)
        assert kernel.name == f"attention_prefill-bf16-d128-{keys}-w3"
        macros = kernel.defines()
        assert (macros["OSTINATO_KEYS"], macros["OSTINATO_CONSUMERS"]) == ("64", "3")
    kernel = AttentionPrefill(**_PREFILL_FP8, warpgroups=3)
    assert kernel.name == "attention_prefill-e4m3-bf16-d128-packed-w3"
    assert kernel.defines()["OSTINATO_KEYS"] == "96"
    assert AttentionPrefill(**_PREFILL_FP8).defines()["OSTINATO_KEYS"] == "128"
    macros = AttentionPrefill(**{**_PREFILL_FP8, "head_dim": 256}).defines()
    assert (macros["OSTINATO_KEYS"], macros["OSTINATO_CONSUMERS"]) == ("96", "2")
    bf16 = {"dtype": "bf16"}
    for other in (
        {**bf16, "head_dim": 96},
        {**bf16, "head_dim": 128, "keys": "slots"},
        {**_PREFILL_FP8, "head_dim": 64},
        {**_PREFILL_FP8, "head_dim": 256},
    ):
        with pytest.raises(ValueError, match="warpgroups: got 3, expected 0"):
            AttentionPrefill(**other, warpgroups=3)


def test_8_bit_prefill_has_an_output_of_another_dtype() -> None:
    kernel = AttentionPrefill(dtype="e4m3", out_dtype="fp16", head_dim=128)
    assert kernel.name == "attention_prefill-e4m3-fp16-d128-packed"
    macros = kernel.defines()
    assert (macros["OSTINATO_TYPE"], macros["OSTINATO_OUT"]) == ("__nv_fp8_e4m3", "__half")
    assert macros["OSTINATO_BYTES"] == "1"
    assert AttentionPrefill(**_PREFILL).defines()["OSTINATO_BYTES"] == "0"


def test_what_dequantises_is_named_by_both_dtypes() -> None:
    kernel = DequantizeKV(dtype="bf16", kv_dtype="e4m3")
    assert kernel.name == "dequantize_kv-bf16-e4m3"
    macros = kernel.defines()
    assert macros == {"OSTINATO_TYPE": "__nv_bfloat16", "OSTINATO_CACHE": "__nv_fp8_e4m3"}


def test_a_cache_has_the_dtype_of_the_keys_unless_told() -> None:
    assert AppendKV(dtype="bf16") == AppendKV(dtype="bf16", cache_dtype="bf16")
    assert AppendKV(dtype="bf16").name != AppendKV(**_APPEND).name


@pytest.mark.parametrize(
    ("family", "fields", "wrong", "match"),
    [
        (Quantize, _QUANTIZE, {"kind": "softmax"}, "kind: got 'softmax', expected 'per_token' or"),
        (Quantize, _QUANTIZE, {"in_dtype": "int8"}, "in_dtype: got 'int8', expected 'bf16' or"),
        (Quantize, _QUANTIZE, {"out_dtype": "int4"}, "out_dtype: got 'int4', expected 'int8' or"),
        (Quantize, _QUANTIZE, {"weight_dtype": "fp16"}, "weight_dtype: got 'fp16', expected"),
        (Quantize, {**_QUANTIZE, "kind": "per_token"}, {"weight_dtype": "fp32"}, "weight_dtype"),
        (GemmSmallM, _SMALL, {"out_dtype": "int8"}, "out_dtype: got 'int8'"),
        (GemmSmallM, _SMALL, {"max_m": 12}, "max_m: got 12, expected 8 or 16 or 32 or 64"),
        (GemmSmallM, _SMALL, {"token_warps": 3}, "token_warps: got 3"),
        (GemmTiled, _TILED, {"dtype": "int4"}, "dtype: got 'int4'"),
        (GemmTiled, _TILED, {"out_dtype": "fp64"}, "out_dtype: got 'fp64'"),
        (GemmTiled, _TILED, {"channels": 80}, "channels: got 80, expected 64 or 96 or"),
        (GemmTiled, _TILED, {"tokens": 4}, "tokens: got 4, expected 8 or 16 or 32 or 64 or 128 or"),
        (GemmTiled, _TILED, {"tokens": 32, "channels": 96}, "channels: got 96, expected 64 or 128"),
        (FusedLinear, _FUSED, {"kind": "silu_mul"}, "kind: got 'silu_mul', expected"),
        (FusedLinear, _FUSED, {"in_dtype": "fp32"}, "in_dtype: got 'fp32', expected 'bf16' or"),
        (FusedLinear, _FUSED, {"out_dtype": "int8"}, "out_dtype: got 'int8', expected 'bf16' or"),
        (FusedLinear, _FUSED, {"max_k": 2048}, "max_k: got 2048, expected 4096 or 8192"),
        (FusedLinear, _FUSED, {"weight_dtype": "fp16"}, "weight_dtype: got 'fp16', expected"),
        (FusedLinear, _FUSED, {"activation": "silu"}, "activation: got 'silu', expected '' or"),
        (
            *(FusedLinear, _FUSED, {"activation": "silu_mul", "out_dtype": "fp32"}),
            "activation: got 'silu_mul', expected ''",
        ),
        (ActivatedLinear, {"out_dtype": "bf16"}, {"out_dtype": "int8"}, "out_dtype: got 'int8'"),
        (Embed, {"dtype": "bf16"}, {"dtype": "e4m3"}, "dtype: got 'e4m3', expected 'bf16' or"),
        (MergeStates, {"dtype": "fp32"}, {"dtype": "int8"}, "dtype: got 'int8', expected 'bf16'"),
        (Sample, {"dtype": "fp32"}, {"dtype": "int8"}, "dtype: got 'int8', expected 'bf16' or"),
        (AppendKV, _APPEND, {"dtype": "int8"}, "dtype: got 'int8', expected 'bf16' or"),
        (AppendKV, _APPEND, {"cache_dtype": "fp16"}, "cache_dtype: got 'fp16', expected 'bf16' or"),
        (AttentionPrefill, _PREFILL, {"dtype": "int8"}, "dtype: got 'int8', expected 'bf16' or"),
        (DequantizeKV, _DEQUANTIZE, {"dtype": "fp32"}, "dtype: got 'fp32', expected 'bf16' or"),
        (DequantizeKV, _DEQUANTIZE, {"kv_dtype": "bf16"}, "kv_dtype: got 'bf16', expected 'int8'"),
        (AttentionPrefill, _PREFILL, {"keys": "dense"}, "keys: got 'dense', expected 'packed' or"),
        (AttentionPrefill, _PREFILL, {"head_dim": 72}, "head_dim: got 72, expected a multiple of"),
        (AttentionPrefill, _PREFILL, {"value_dim": 272}, "value_dim: got 272, expected a multiple"),
        (
            AttentionPrefill,
            _PREFILL,
            {"value_dim": 208},
            "value_dim: got 208, expected at most 192",
        ),
        (AttentionPrefill, _PREFILL, {"out_dtype": "fp16"}, "out_dtype: got 'fp16', expected"),
        (AttentionPrefill, _PREFILL_FP8, {"out_dtype": ""}, "out_dtype: got 'e4m3', expected"),
        (AttentionPrefill, _PREFILL_FP8, {"keys": "pages"}, "keys: got 'pages', expected 'packed'"),
        (AttentionPrefill, _PREFILL_FP8, {"head_dim": 96}, "head_dim: got 96, expected 64 or 128"),
        (AttentionPrefill, _PREFILL_FP8, {"value_dim": 64}, "value_dim: got 64, expected 128"),
        (GemmTiled, _TILED, {"fast_accum": True}, "fast_accum: got True with dtype 'int8'"),
    ],
)
def test_fields_that_no_kernel_has_are_refused(
    family: type, fields: dict, wrong: dict, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        family(**{**fields, **wrong})


def test_select_gives_everything_by_default() -> None:
    assert select(CATALOGUE) == list(CATALOGUE)


def test_select_by_family_and_by_name() -> None:
    chosen = select(CATALOGUE, only=["gemm_small_m", "quantize-silu_mul-bf16-e4m3"])
    assert Quantize(kind="silu_mul", in_dtype="bf16", out_dtype="e4m3") in chosen
    assert {type(variant) for variant in chosen} == {GemmSmallM, Quantize}
    assert sum(type(variant) is Quantize for variant in chosen) == 1


@pytest.mark.parametrize(
    ("dtypes", "kept", "dropped"),
    [
        ({"int8"}, {"int8", "bf16", "fp16", "fp32"}, {"e4m3"}),
        ({"bf16"}, {"int8", "e4m3", "bf16"}, {"fp16", "fp32"}),
        ({"e4m3", "fp16"}, {"e4m3", "fp16"}, {"int8", "bf16", "fp32"}),
    ],
)
def test_select_by_dtypes(dtypes: set[str], kept: set[str], dropped: set[str]) -> None:
    found = set().union(*(variant.dtypes() for variant in select(CATALOGUE, dtypes=dtypes)))
    assert found == kept
    assert not found & dropped


_DIMS = st.integers(1, 16).map(lambda i: 16 * i)


@st.composite
def _variants_of_first_use(draw: st.DrawFn) -> Variant:
    """Draw what an op may ask for, listed or not."""
    dtype = draw(st.sampled_from(["bf16", "fp16"]))
    family = draw(st.sampled_from([AttentionDecode, AttentionPrefill, Quantize]))
    fields: dict[str, object] = {"dtype": dtype}
    if family is AttentionDecode:
        fields |= {
            "head_dim": draw(_DIMS),
            "kv_dtype": draw(st.sampled_from([dtype, "int8", "e4m3"])),
            "columns": draw(st.sampled_from([8, 16, 32, 64])),
            "copy_pages": draw(st.booleans()),
            "split_tokens": (split := draw(st.sampled_from([0, 512, 1024]))),
            "cluster": draw(st.sampled_from([1, 4] if split else [1, 2, 4, 8])),
        }
    elif family is AttentionPrefill and draw(st.booleans()):
        fields = {
            "dtype": "e4m3",
            "out_dtype": dtype,
            "head_dim": (dim := draw(st.sampled_from([64, 128, 256]))),
            "warpgroups": draw(st.sampled_from([0, 3] if dim == 128 else [0])),
        }
    elif family is AttentionPrefill:
        fields |= {
            "head_dim": (dim := draw(st.just(128) | _DIMS)),
            "value_dim": (value_dim := draw(st.just(0) | _DIMS)),
            "keys": draw(st.sampled_from(["packed", "pages", "slots"])),
            "warpgroups": draw(st.sampled_from([0, 3] if (dim, value_dim) == (128, 0) else [0])),
        }
    else:
        fields = {
            "kind": draw(st.sampled_from(QUANTIZE_KINDS)),
            "in_dtype": dtype,
            "out_dtype": draw(st.sampled_from([dtype, "int8", "e4m3"])),
            "weight_dtype": draw(st.sampled_from(["", "fp32"])),
        }
    try:
        return family(**fields)
    except ValueError:
        reject()


@given(_variants_of_first_use())
def test_what_an_error_tells_to_build_can_be_selected(variant: Variant) -> None:
    assert select(CATALOGUE, only=[variant.name]) == [variant]


@pytest.mark.parametrize("variant", CATALOGUE, ids=lambda variant: variant.name)
def test_every_listed_variant_is_selected_by_its_name(variant: Variant) -> None:
    assert select(CATALOGUE, only=[variant.name]) == [variant]


@pytest.mark.parametrize(
    "name",
    [
        "attention_decode-bf16-d17-c8",
        "attention_decode-bf16-d080-c8",
        "attention_decode-bf16-bf16_kv-d80-c8",
        "attention_decode-bf16-d80-c8-cluster1",
        "attention_decode-bf16-d80-c8 ",
        "attention_prefill-bf16-d80v80-packed",
        "attention_prefill-fp32-d80-packed",
        "quantize-rms_norm-bf16-int8-bf16_weight",
        "gemm_tiled-int8-bf16-64x48",
    ],
)
def test_select_refuses_names_that_no_kernel_has(name: str) -> None:
    with pytest.raises(ValueError, match=f"only: got '{name}', expected activated_linear or"):
        select(CATALOGUE, only=[name])


def test_select_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="only: got 'gem', expected activated_linear or append_kv"):
        select(CATALOGUE, only=["gem"])
    with pytest.raises(ValueError, match="dtypes: got 'int4', expected int8 or e4m3 or bf16"):
        select(CATALOGUE, dtypes=["int4"])


def test_select_refuses_a_selection_of_nothing() -> None:
    with pytest.raises(
        ValueError, match="no kernel of quantize-silu_mul-bf16-e4m3 has dtypes int8"
    ):
        select(CATALOGUE, only=["quantize-silu_mul-bf16-e4m3"], dtypes=["int8"])


def test_families_are_named_once() -> None:
    assert len(families(CATALOGUE)) == len(set(families(CATALOGUE)))
    assert {variant.family for variant in CATALOGUE} == set(families(CATALOGUE))


@pytest.mark.parametrize(
    ("channels", "tokens", "tile_channels", "parts"),
    [(224, 128, 0, 1146), (256, 128, 0, 1002), (128, 32, 0, 2004), (128, 32, 80, 3208)],
)
def test_parts_of_a_row_of_logits(
    channels: int, tokens: int, tile_channels: int, parts: int
) -> None:
    variant = GemmTiled(dtype="int8", out_dtype="fp32", channels=channels, tokens=tokens)
    assert variant.finds_argmax
    assert variant.argmax_parts(128256, tile_channels) == parts


@pytest.mark.parametrize(
    "changed", [{"out_dtype": "bf16"}, {"tokens": 16}, {"pingpong": True}], ids=str
)
def test_kernels_that_look_for_no_argmax(changed: dict[str, object]) -> None:
    assert not GemmTiled(**{**_TILED, "out_dtype": "fp32", **changed}).finds_argmax
