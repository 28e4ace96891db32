"""The native loader: which arguments reach a kernel library, and which libraries are refused."""

from __future__ import annotations

import ctypes
import re
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from jit_probe import build_library, build_recorder, params_of

from ostinato import _C
from ostinato.jit.sources import CSRC
from ostinato.jit.variant import Variant
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.attention.decode_variants import AttentionDecode
from ostinato.ops.attention.l2_partition import L2Probe
from ostinato.ops.attention.merge_states import MergeStates
from ostinato.ops.attention.prefill_variants import AttentionPrefill
from ostinato.ops.catalogue import CATALOGUE
from ostinato.ops.embed import Embed
from ostinato.ops.linear.fused_cuda import ActivatedLinear, FusedLinear
from ostinato.ops.linear.gemm_variants import GemmTiled
from ostinato.ops.linear.quantize_cuda import Quantize
from ostinato.ops.sampling.sample_cuda import Sample

_VARIANT = Quantize(kind="silu_mul", in_dtype="bf16", out_dtype="e4m3")
_TILED = GemmTiled(dtype="int8", out_dtype="bf16", channels=128, tokens=128)
_FUSED = {
    "kind": "per_token",
    "in_dtype": "bf16",
    "out_dtype": "bf16",
    "max_k": 4096,
}
_TILING = ("tile_channels", "tile_tokens", "cluster", "share_weights", "split_k", "band")


class GemmFields(ctypes.Structure):
    _fields_ = [
        *[("x", ctypes.c_void_p), ("x_stride", ctypes.c_int64)],
        *[("w", ctypes.c_void_p), ("w_stride", ctypes.c_int64)],
        *[("x_scale", ctypes.c_void_p), ("x_scale_stride", ctypes.c_int32)],
        *[("w_scale", ctypes.c_void_p), ("w_scale_stride", ctypes.c_int32)],
        ("bias", ctypes.c_void_p),
        *[("x_zero_point", ctypes.c_void_p), ("x_zero_point_stride", ctypes.c_int32)],
        ("w_sum", ctypes.c_void_p),
        ("n_active", ctypes.c_void_p),
        *[("out", ctypes.c_void_p), ("out_stride", ctypes.c_int64)],
        *[("best", ctypes.c_void_p), ("best_stride", ctypes.c_int64)],
        *[(name, ctypes.c_void_p) for name in ("temperature", "repetition_penalty")],
        *[(name, ctypes.c_int32) for name in ("m", "n", "k")],
        *[(name, ctypes.c_int32) for name in _TILING],
        ("pdl", ctypes.c_int32),
    ]


class QuantizeFields(ctypes.Structure):
    _fields_ = [
        *[("x", ctypes.c_void_p), ("x_stride", ctypes.c_int64)],
        *[("residual", ctypes.c_void_p), ("residual_stride", ctypes.c_int64)],
        *[("residual_out", ctypes.c_void_p), ("residual_out_stride", ctypes.c_int64)],
        *[("norm_weight", ctypes.c_void_p), ("eps", ctypes.c_float)],
        *[("static_scale", ctypes.c_void_p), ("zero_point", ctypes.c_void_p)],
        *[("out", ctypes.c_void_p), ("out_stride", ctypes.c_int64)],
        *[("scale_out", ctypes.c_void_p), ("scale_stride", ctypes.c_int64)],
        *[(name, ctypes.c_int32) for name in ("power_of_two", "m", "k", "pdl")],
        ("n_active", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in ("discard_x", "heads")],
        *[(name, ctypes.c_void_p) for name in ("norm_bias", "zero_point_out")],
    ]


class HeadsFields(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("stride", "head_stride")],
    ]


class SlotsFields(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("page_stride", "stride", "head_stride")],
    ]


class L2PartitionFields(ctypes.Structure):
    _fields_ = [(f"word_{i}", ctypes.c_uint32) for i in range(10)]


_FLAGS = {"pdl", "top_k_is_int64", "discard_x", "by_all"}
_APPEND_FLAGS = (
    *("k_scale_per_token", "v_scale_per_token", "interleaved", "pdl"),
    "norm_after_rotation",
)
_NORM_FLAGS = ("q_norm_is_fp32", "k_norm_is_fp32")


class AppendKVFields(ctypes.Structure):
    _fields_ = [
        *[(name, HeadsFields) for name in ("q", "q_out", "k", "v")],
        *[(name, SlotsFields) for name in ("k_cache", "v_cache", "k_scale", "v_scale")],
        *[(name, ctypes.c_int32) for name in _APPEND_FLAGS[:2]],
        *[(name, SlotsFields) for name in ("k_scale_out", "v_scale_out")],
        *[(name, ctypes.c_void_p) for name in ("slot_mapping", "positions", "cos_sin")],
        ("cos_sin_stride", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("q_norm_weight", "k_norm_weight")],
        *[(name, ctypes.c_int32) for name in _NORM_FLAGS],
        ("norm_eps", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("tokens", "heads_q", "heads_kv", "dim")],
        *[(name, ctypes.c_int32) for name in ("rotary_dim", "page_size")],
        *[(name, ctypes.c_int32) for name in _APPEND_FLAGS[2:]],
    ]


_DECODE_COUNTS = ("batch", "heads_q", "heads_kv", "pages", "page_size", "max_pages", "max_seqlen_q")


class PagedDecodeFields(ctypes.Structure):
    _fields_ = [
        ("q", HeadsFields),
        *[(name, SlotsFields) for name in ("k_cache", "v_cache", "k_scale", "v_scale")],
        *[("page_table", ctypes.c_void_p), ("page_table_stride", ctypes.c_int64)],
        *[(name, ctypes.c_void_p) for name in ("seq_lens", "cu_seqlens_q", "sinks")],
        *[("out", HeadsFields), ("lse", HeadsFields)],
        ("workspace", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in (*_DECODE_COUNTS, "left", "right")],
        *[("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("pdl", ctypes.c_int32)],
        ("l2_partition", L2PartitionFields),
    ]


class SampleFields(ctypes.Structure):
    _fields_ = [
        *[("logits", ctypes.c_void_p), ("logits_stride", ctypes.c_int64)],
        *[(name, ctypes.c_void_p) for name in ("temperature", "top_k", "top_p", "min_p")],
        *[(name, ctypes.c_void_p) for name in ("seeds", "counters", "repetition_penalty")],
        *[("seen", ctypes.c_void_p), ("seen_stride", ctypes.c_int64)],
        *[(name, ctypes.c_void_p) for name in ("seen_rows", "best")],
        *[("best_stride", ctypes.c_int64), ("out", ctypes.c_void_p)],
        *[(name, ctypes.c_int32) for name in ("parts", "rows", "vocabulary")],
        *[(name, ctypes.c_int32) for name in ("top_k_is_int64", "pdl")],
    ]


class EmbedFields(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("tokens", "table")],
        *[("table_stride", ctypes.c_int64), ("seen", ctypes.c_void_p)],
        ("seen_stride", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("seen_rows", "n_active", "out")],
        ("out_stride", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("rows", "vocabulary", "first_id", "table_rows")],
        *[(name, ctypes.c_int32) for name in ("dim", "seen_size", "pdl")],
    ]


class FusedLinearFields(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "residual", "residual_out", "norm_weight")],
        *[("eps", ctypes.c_float), ("w", ctypes.c_void_p), ("w_scale", ctypes.c_void_p)],
        *[("w_scale_stride", ctypes.c_int32), ("bias", ctypes.c_void_p), ("out", ctypes.c_void_p)],
        *[("maxima", ctypes.c_void_p), ("n_maxima", ctypes.c_int32)],
        *[(name, ctypes.c_int32) for name in ("n", "k", "pdl")],
    ]


class ActivatedLinearFields(ctypes.Structure):
    _fields_ = [
        *[("x", ctypes.c_void_p), ("maxima", ctypes.c_void_p), ("n_maxima", ctypes.c_int32)],
        *[("w", ctypes.c_void_p), ("w_scale", ctypes.c_void_p), ("w_scale_stride", ctypes.c_int32)],
        *[("bias", ctypes.c_void_p), ("out", ctypes.c_void_p)],
        *[(name, ctypes.c_int32) for name in ("n", "k", "pdl")],
    ]


_PREFILL_COUNTS = (
    *("batch", "heads_q", "heads_kv", "tokens_q", "tokens_k", "pages", "page_size", "max_pages"),
    *("max_seqlen_q", "max_seqlen_k", "left", "right"),
)


class PrefillFields(ctypes.Structure):
    _fields_ = [
        *[("q", HeadsFields), ("k", SlotsFields), ("v", SlotsFields)],
        *[(name, ctypes.c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_k", "seq_lens")],
        *[("page_table", ctypes.c_void_p), ("page_table_stride", ctypes.c_int64)],
        *[("sinks", ctypes.c_void_p), ("out", HeadsFields), ("lse", HeadsFields)],
        ("workspace", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in _PREFILL_COUNTS],
        *[("scale", ctypes.c_float), ("softcap", ctypes.c_float)],
        *[(name, ctypes.c_int32) for name in ("least_rows", "pack", "pdl")],
        *[(f"{name}_scale", ctypes.c_void_p) for name in "qkv"],
        *[(f"{name}_scale_stride", ctypes.c_int32) for name in "qkv"],
    ]


class L2ProbeFields(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("base", "offsets", "clocks", "sms")],
        *[(name, ctypes.c_int32) for name in ("count", "by_all")],
    ]


class MergeStatesFields(ctypes.Structure):
    _fields_ = [
        *[(name, HeadsFields) for name in ("o_a", "o_b", "out", "lse_a", "lse_b", "out_lse")],
        *[(name, ctypes.c_int32) for name in ("tokens", "heads", "dim", "pdl")],
    ]


_WORKSPACE = """\
OSTINATO_WORKSPACE(ostinato::DecodeCapacities) {
  const ostinato::DecodeCapacities& c = *capacities;
  *bytes = (int64_t{1} << 40) + c.rows + 10 * c.sequences + 100 * c.tokens;
  return c.rows == 0;
}
"""
_FIXED_WORKSPACE = """\
OSTINATO_WORKSPACE(ostinato::PrefillCapacities) { *bytes = int64_t{3} << 40; return 0; }
"""


def _recorded(path: Path, fields: type[ctypes.Structure]) -> tuple[dict[str, object], int]:
    library = ctypes.CDLL(str(path))
    library.recorded.restype = ctypes.POINTER(fields)
    library.recorded_stream.restype = ctypes.c_void_p
    record = library.recorded().contents
    seen = {name: getattr(record, name) for name, _ in fields._fields_}
    for name, value in seen.items():
        if isinstance(value, ctypes.Structure):
            seen[name] = tuple(getattr(value, field) for field, _ in value._fields_)
    return seen, library.recorded_stream()


def _distinct(fields: type[ctypes.Structure]) -> dict[str, object]:
    """Give every field a value of its own: large where the type allows."""
    values: dict[str, object] = {}
    for i, (name, kind) in enumerate(fields._fields_, start=1):
        if issubclass(kind, ctypes.Structure):
            step = 50 if kind._fields_[0][1] is ctypes.c_void_p else 8
            apart = 40 if step == 50 else 0
            count = len(kind._fields_)
            values[name] = tuple((i << step) + (j << apart) + 1 + j for j in range(count))
        elif kind is ctypes.c_float:
            values[name] = 0.5 + i
        else:
            values[name] = (i << 40) + i if kind in (ctypes.c_void_p, ctypes.c_int64) else i
    return {**values, **dict.fromkeys(_FLAGS & values.keys(), 1)}


@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        (_TILED, GemmFields),
        (_VARIANT, QuantizeFields),
        (AttentionDecode(dtype="bf16", head_dim=128), PagedDecodeFields),
        (Embed(dtype="bf16"), EmbedFields),
        (FusedLinear(**_FUSED), FusedLinearFields),
        (ActivatedLinear(out_dtype="bf16"), ActivatedLinearFields),
        (Sample(dtype="fp32"), SampleFields),
        (AttentionPrefill(dtype="bf16", head_dim=128), PrefillFields),
        (MergeStates(dtype="fp16"), MergeStatesFields),
        (L2Probe(), L2ProbeFields),
    ],
    ids=lambda value: getattr(value, "family", ""),
)
def test_every_argument_reaches_its_field(
    tmp_path: Path, variant: Variant, fields: type[ctypes.Structure]
) -> None:
    path = build_recorder(tmp_path, variant.source)
    library = _C.Library(str(path))
    sent = _distinct(fields)
    assert list(library.fields) == [name for name, _ in fields._fields_]
    library.launch(**{**sent, **dict.fromkeys(_FLAGS & sent.keys(), True)}, stream=(7 << 50) + 1)
    assert _recorded(path, fields) == (sent, (7 << 50) + 1)


@pytest.mark.parametrize("flag", [*_APPEND_FLAGS, *_NORM_FLAGS])
def test_every_argument_of_append_kv_reaches_its_field(tmp_path: Path, flag: str) -> None:
    path = build_recorder(tmp_path, AppendKV(dtype="bf16").source)
    flags = {name: name == flag for name in (*_APPEND_FLAGS, *_NORM_FLAGS)}
    sent = {**_distinct(AppendKVFields), **flags}
    _C.Library(str(path)).launch(**sent, stream=(7 << 50) + 1)
    assert _recorded(path, AppendKVFields) == (sent, (7 << 50) + 1)


def test_the_workspace_is_the_librarys_to_say(tmp_path: Path) -> None:
    source = AttentionDecode(dtype="bf16", head_dim=128).source
    library = _C.Library(str(build_recorder(tmp_path, source, extra=_WORKSPACE)))
    found = library.workspace_bytes(rows=3, sequences=1 << 33, tokens=1 << 34)
    assert found == (1 << 40) + 3 + 10 * (1 << 33) + 100 * (1 << 34)
    with pytest.raises(RuntimeError, match=r"workspace_bytes of .*: invalid argument"):
        library.workspace_bytes(rows=0, sequences=1, tokens=1)
    with pytest.raises(TypeError, match="workspace_bytes: got no tokens"):
        library.workspace_bytes(rows=0, sequences=1)


def test_a_workspace_may_depend_on_no_capacity(tmp_path: Path) -> None:
    source = AttentionPrefill(dtype="bf16", head_dim=128).source
    path = build_recorder(tmp_path, source, extra=_FIXED_WORKSPACE)
    assert _C.Library(str(path)).workspace_bytes() == 3 << 40


def test_a_library_without_a_workspace_says_so(recorder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"recorder\.so: workspace_bytes: .* take no workspace"):
        _C.Library(str(recorder)).workspace_bytes()


def test_optional_arguments_are_null(tmp_path: Path) -> None:
    path = build_recorder(tmp_path, _TILED.source)
    required = dict.fromkeys(
        [
            *["x", "x_stride", "w", "w_stride", "x_scale", "x_scale_stride", "w_scale"],
            *["w_scale_stride", "out", "out_stride", "m", "n", "k", "stream"],
        ],
        1,
    )
    _C.Library(str(path)).launch(**required)
    seen, _ = _recorded(path, GemmFields)
    assert [seen[name] for name in ("bias", "x_zero_point", "w_sum", "n_active")] == [None] * 4
    assert [seen[name] for name in (*_TILING, "pdl")] == [0] * 7


def test_append_kv_needs_no_q_rotation_norm_or_scales(tmp_path: Path) -> None:
    path = build_recorder(tmp_path, AppendKV(dtype="bf16").source)
    tensors = {"k": (1, 1, 1), "v": (1, 1, 1), "k_cache": (1, 1, 1, 1), "v_cache": (1, 1, 1, 1)}
    names = ("slot_mapping", "tokens", "heads_kv", "dim", "page_size", "stream")
    _C.Library(str(path)).launch(**tensors, **dict.fromkeys(names, 1))
    seen, _ = _recorded(path, AppendKVFields)
    for name in ("q", "q_out", "k_scale", "v_scale", "k_scale_out", "v_scale_out"):
        assert not any(seen[name])
    for name in ("positions", "cos_sin", "q_norm_weight", "k_norm_weight"):
        assert seen[name] is None
    assert [seen[name] for name in ("heads_q", "rotary_dim", *_APPEND_FLAGS)] == [0] * 7


_GOOD = {"x": 1, "x_stride": 1, "out": 1, "out_stride": 1, "m": 1, "k": 1, "stream": 0}


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"m": 1 << 31}, ValueError, r"m: got 2147483648, expected -2\*\*31 to 2\*\*31 - 1"),
        ({"m": -(1 << 31) - 1}, ValueError, "m: got -2147483649, expected"),
        ({"x": -1}, ValueError, "x: got -1, expected an address"),
        ({"stream": -1}, ValueError, "stream: got -1, expected an address"),
        ({"x_stride": 1 << 63}, ValueError, "x_stride: got 9223372036854775808, expected"),
        ({"eps": 1e39}, ValueError, r"eps: got 1e\+39, expected a number that fits in fp32"),
        ({"eps": "1"}, TypeError, "eps: got '1', expected a number"),
        ({"k": 1.5}, TypeError, "k: got 1.5, expected an integer"),
        ({"x": "1"}, TypeError, "x: got '1', expected an integer"),
        ({"m": None}, TypeError, "m: got None, expected an integer"),
        ({"x": (1, 2)}, TypeError, r"x: got \(1, 2\), expected an integer"),
        ({"residul": 1}, TypeError, "got field residul, which it has not; the closest is residual"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(
    recorder: Path, wrong: dict[str, object], error: type[Exception], match: str
) -> None:
    launch = _C.Library(str(recorder)).launch
    for _ in range(2):  # a call that failed must not be taken for a known one
        with pytest.raises(error, match=rf"recorder\.so: launch: {match}"):
            launch(**{**_GOOD, **wrong})
    launch(**_GOOD)
    with pytest.raises(TypeError, match="launch: got 1 positional arguments, expected keywords"):
        launch(1, **_GOOD)


@pytest.mark.parametrize("name", _GOOD)
def test_a_missing_argument_is_named(recorder: Path, name: str) -> None:
    given = {key: value for key, value in _GOOD.items() if key != name}
    with pytest.raises(TypeError, match=rf"recorder\.so: launch: got no {name}, which every"):
        _C.Library(str(recorder)).launch(**given)
    with pytest.raises(TypeError, match="launch: got no "):
        _C.Library(str(recorder)).launch()


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ((1, 2), ValueError, "k: got 2 numbers, expected 3"),
        (7, TypeError, "k: got 7, expected a tuple or a list"),
        ((1, 2.5, 3), TypeError, "k: got 2.5, expected an integer"),
        ((-1, 2, 3), ValueError, "k: got -1, expected an address"),
    ],
)
def test_tuples_that_do_not_fit_are_refused(
    tmp_path: Path, value: object, error: type[Exception], match: str
) -> None:
    path = build_recorder(tmp_path, AppendKV(dtype="bf16").source)
    given = {**_distinct(AppendKVFields), "k": value}
    with pytest.raises(error, match=match):
        _C.Library(str(path)).launch(**given, stream=0)


def test_many_call_sites_and_names_made_up_reach_their_fields(tmp_path: Path) -> None:
    path = build_recorder(tmp_path)
    launch = _C.Library(str(path)).launch
    optional = ("residual", "norm_weight", "static_scale", "zero_point", "scale_out")
    for _ in range(2):
        for chosen in product((False, True), repeat=len(optional)):
            pairs = zip(optional, chosen, strict=True)
            given = {name: 9 for name, is_given in pairs if is_given}
            made_up = {"".join(list(name)): value for name, value in given.items()}
            launch(**_GOOD, **made_up)
            seen, _ = _recorded(path, QuantizeFields)
            for name in optional:
                assert seen[name] == given.get(name)


def test_integers_of_numpy_and_lists_are_taken(tmp_path: Path) -> None:
    path = build_recorder(tmp_path, AppendKV(dtype="bf16").source)
    given = {**_distinct(AppendKVFields), "k": [np.int64(5), 6, 7], "tokens": np.int32(3)}
    _C.Library(str(path)).launch(**given, stream=0)
    seen, _ = _recorded(path, AppendKVFields)
    assert (seen["k"], seen["tokens"]) == ((5, 6, 7), 3)


def test_cuda_errors_are_raised_with_the_librarys_words(tmp_path: Path) -> None:
    path = build_recorder(tmp_path, prepare=1, launch=9)
    library = _C.Library(str(path))
    with pytest.raises(RuntimeError, match=r"CUDA error in prepare of .*: invalid argument"):
        library.prepare()
    with pytest.raises(RuntimeError, match=r"CUDA error in launch of .*: unknown"):
        library.launch(x=1, x_stride=1, out=1, out_stride=1, m=1, k=1, stream=0)


_TABLE = """\
#include "common/entry.h"
using namespace ostinato;
static const Field fields[] = {{{fields}}};
static const FieldTable table = {{{format}, {size}, {count}, fields}};
OSTINATO_EXPORT const FieldTable* ostinato_fields(void) {{ return {given}; }}
OSTINATO_EXPORT const char* ostinato_error_string(int) {{ return ""; }}
OSTINATO_EXPORT int ostinato_prepare(void) {{ return 0; }}
OSTINATO_EXPORT int ostinato_launch(const void*, void*) {{ return 0; }}
"""


@pytest.mark.parametrize(
    ("fields", "table", "match"),
    [
        ('{"a", "p", 0, 8, 1}', {"format": 2}, "format of its fields: got 2, expected 1"),
        ('{"a", "p", 0, 8, 1}', {"given": "nullptr"}, "format of its fields: got no table"),
        ('{"a", "p", 0, 8, 1}', {"size": 4097}, "size of its struct: got 4097 bytes, expected at"),
        ('{"a", "z", 0, 8, 1}', {}, "field a: got kind 'z' of 8 bytes, expected letters of"),
        ('{"a", "", 0, 8, 1}', {}, "field a: got kind '' of 8 bytes, expected letters of"),
        ('{"a", "i", 0, 8, 1}', {}, "field a: got kind 'i' of 8 bytes, expected letters of"),
        ('{"a", "p", 12, 8, 1}', {}, "field a: ends outside of its struct of 16 bytes"),
        ('{"a", "p", 4294967292, 8, 1}', {}, "field a: ends outside of its struct"),
        (
            '{"a", "p", 4, 8, 1}, {"b", "i", 0, 4, 1}',
            {},
            "field a: got offset 4, expected a mult",
        ),
        ('{"a", "p", 0, 8, 1}, {"b", "i", 4, 4, 1}', {}, "field b: overlaps another field"),
        ('{"a", "p", 0, 8, 1}, {"a", "p", 8, 8, 1}', {}, "field a: this name is taken"),
        ('{"stream", "p", 0, 8, 1}', {}, "field stream: this name is taken"),
    ],
)
def test_a_library_whose_table_does_not_fit_is_refused(
    tmp_path: Path, fields: str, table: dict[str, object], match: str
) -> None:
    chosen = {"format": 1, "size": 16, "given": "&table", "count": fields.count("{"), **table}
    path = build_library(tmp_path, _TABLE.format(fields=fields, **chosen))
    with pytest.raises(RuntimeError, match=rf"recorder\.so: {match}.*pip install -e"):
        _C.Library(str(path))


def test_what_is_no_kernel_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"cannot load a kernel library: .*missing\.so"):
        _C.Library(str(tmp_path / "missing.so"))
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(RuntimeError, match="cannot load a kernel library"):
        _C.Library(str(tmp_path / "text.so"))
    source = tmp_path / "empty.c"
    source.write_text("int nothing;")
    subprocess.run(["g++", "-shared", source, "-o", tmp_path / "empty.so"], check=True)
    with pytest.raises(RuntimeError, match="no symbol ostinato_fields"):
        _C.Library(str(tmp_path / "empty.so"))


def test_every_kernel_describes_the_struct_that_it_takes() -> None:
    for source in sorted({variant.source for variant in CATALOGUE}):
        struct, header = params_of(source)
        name, text = struct.rpartition("::")[2], (CSRC / header).read_text(encoding="utf-8")
        declared = re.search(rf"struct {name} {{(.*?)FIELDS_END", text, re.DOTALL)
        assert declared is not None
        members = re.sub(r"//.*|^#(if OSTINATO_\w+|endif)$", "", declared[1], flags=re.MULTILINE)
        # No member is declared but by the macros that describe it, some for a macro of the kernel.
        assert not re.sub(r"OSTINATO_\w+\([^)]*\);|\s|OSTINATO_?", "", members), source
