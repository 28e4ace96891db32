"""Which sizes the GPU tests of products cover, and which kernels the GPU tests launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ostinato.jit.compiler import Plan, plan
from ostinato.jit.targets import target_named
from ostinato.jit.variant import FLOAT_DTYPES, OPERAND_DTYPES, Variant
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.attention.decode_variants import SPLIT_TOKENS, AttentionDecode
from ostinato.ops.attention.merge_states import MergeStates
from ostinato.ops.attention.prefill_variants import AttentionPrefill
from ostinato.ops.catalogue import CATALOGUE
from ostinato.ops.collective.collective_cuda import Collective
from ostinato.ops.embed import Embed
from ostinato.ops.linear import tile_table
from ostinato.ops.linear.fused_cuda import ActivatedLinear, FusedLinear
from ostinato.ops.linear.gemm_variants import BLOCK_E4M3, DTYPES_16_BIT, out_dtypes, sharing
from ostinato.ops.linear.quantize_cuda import ACTIVATIONS, GATED, GROUP, NORMS, Quantize
from ostinato.ops.sampling.process_logits import ProcessLogits
from ostinato.ops.sampling.sample_cuda import Sample
from ostinato.ops.sampling.softcap import Softcap
from ostinato.ops.sampling.token_logprobs import TokenLogprobsKernel

# What the tests of products cover: the many sizes in bf16, the others at some sizes.
TOKENS = (
    *(0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65),
    *(127, 128, 129, 255, 256, 257, 300, 1000),
)
FEW_TOKENS = (3, 9, 20, 70)
# What those of logits do: tokens, vocabularies and the features they are made of.
LOGITS_TOKENS, VOCABULARIES, LOGITS_FEATURES = (
    (1, 16, 17, 32, 48, 64, 100, 128, 200, 256),
    (1003, 32000),
    512,
)

# Activations whose results tests quantise: those of models.
ROW_FUNCTIONS = ("silu_mul", "gelu_tanh_mul", "gelu_mul", "gelu_tanh", "gelu", "relu2")


# Of every family that needs nothing of Hopper.
ROW_KERNELS = (
    *(variant for variant in CATALOGUE if not variant.needs),
    *(
        replace(variant, weight_dtype="fp32")
        for variant in CATALOGUE
        if isinstance(variant, Quantize)
        and variant.kind in NORMS
        and variant.weight_dtype in ("bf16", "fp16")
    ),
)


# Families all of whose listed variants the tests launch.
_ALL_OF = (
    *(Embed, AppendKV, MergeStates, FusedLinear, ActivatedLinear, Quantize, Collective),
    *(Sample, Softcap, ProcessLogits, TokenLogprobsKernel),
)


def plans_of_earlier_gpus() -> Iterator[Plan]:
    """Yield what tests compile as PTX: a GPU that stands in for an earlier one launches it."""
    for name, variant in product(("compute_80", "compute_89"), ROW_KERNELS):
        yield plan(variant, target=target_named(name))


def kernels_of_the_tests(sms: int) -> Iterator[Variant]:
    """Yield what the tests of the ops launch on a GPU of so many SMs, but for listed attention."""
    for variant in CATALOGUE:
        if isinstance(variant, _ALL_OF):
            yield variant
        normed = isinstance(variant, Quantize) and variant.kind in NORMS
        if normed or (isinstance(variant, FusedLinear) and variant.kind == "rms_norm"):
            yield replace(variant, weight_dtype="fp32")
    yield from _unlisted_rows()
    yield from _unlisted_gates()
    yield from _attention()
    yield from dense_products(sms)
    for dtype, out_dtype in product(OPERAND_DTYPES, FLOAT_DTYPES):
        for m in TOKENS if out_dtype == "bf16" else FEW_TOKENS:
            for packed, fast_accum, invariant in product([False, True], repeat=3):
                if m and (fast_accum or out_dtype == "bf16"):
                    yield tile_table.choose(
                        m,
                        1000,
                        1000,
                        dtype,
                        out_dtype,
                        packed=packed,
                        fast_accum=fast_accum,
                        batch_invariant=invariant,
                        sms=sms,
                    ).variant
    yield from block_kernels(sms)
    for dtype, m, n in product(OPERAND_DTYPES, LOGITS_TOKENS, VOCABULARIES):
        how = {"packed": True, "batch_invariant": True, "sms": sms}
        yield tile_table.choose(m, n, LOGITS_FEATURES, dtype, "fp32", **how).variant


def _unlisted_rows() -> Iterator[Variant]:
    """Yield norms and activations that the catalogue lists in bf16 alone, or not at all."""
    for kind, dtype in product(("layer_norm", *ACTIVATIONS), FLOAT_DTYPES):
        yield Quantize(kind=kind, in_dtype=dtype, out_dtype=dtype)
        if kind == "layer_norm":
            yield Quantize(kind=kind, in_dtype=dtype, out_dtype=dtype, weight_dtype="fp32")
    for kind, out_dtype in product(("layer_norm", *ROW_FUNCTIONS), OPERAND_DTYPES):
        yield Quantize(kind=kind, in_dtype="fp32", out_dtype=out_dtype)
    yield Quantize(kind="layer_norm", in_dtype="fp32", out_dtype="e4m3", group=GROUP)


def _unlisted_gates() -> Iterator[Variant]:
    """Yield the layers of gates and ups that the catalogue does not list."""
    wide = (("gelu_tanh_mul", "fp32"), ("silu_mul", "fp32"))
    for kind, weight in (*product(GATED, ("bf16",)), *wide):
        yield FusedLinear(
            kind="rms_norm",
            in_dtype="bf16",
            out_dtype="bf16",
            max_k=4096,
            weight_dtype=weight,
            activation=kind,
        )


def block_kernels(sms: int) -> Iterator[Variant]:
    """Yield what the tests of FP8 with block scales launch on a GPU of so many SMs."""
    yield from (v for v in CATALOGUE if isinstance(v, Quantize) and v.group)
    for out_dtype in FLOAT_DTYPES:
        sizes = [(136, 272), (203, 400)]
        if out_dtype == "bf16":
            sizes += [(1003, 1000), (1536, 2048), (4096, 4096)]
        for (n, k), m, invariant in product(sizes, filter(None, TOKENS), (False, True)):
            how = {"packed": True, "batch_invariant": invariant, "sms": sms}
            variant = tile_table.choose(m, n, k, BLOCK_E4M3, out_dtype, **how).variant
            yield from (sharing(variant, channels) for channels in (8, 128))


def dense_products(sms: int) -> Iterator[Variant]:
    """Yield what the tests of 16-bit products launch on a GPU of so many SMs."""
    how: dict[str, Any] = {"fast_accum": False, "batch_invariant": True, "sms": sms}
    for dtype, packed in product(DTYPES_16_BIT, (False, True)):
        for out_dtype, m in product(out_dtypes(dtype), filter(None, (*TOKENS, *FEW_TOKENS))):
            choice = tile_table.choose(m, 1000, 500, dtype, out_dtype, packed=packed, **how)
            yield choice.variant
    for m, n in product(LOGITS_TOKENS, VOCABULARIES):
        choice = tile_table.choose(m, n, LOGITS_FEATURES, "bf16", "fp32", packed=True, **how)
        yield choice.variant


# Head dims that the catalogue does not list.
_FURTHER_DIMS = (16, 32, 48, 80, 96, 192)


def _attention() -> Iterator[Variant]:
    invariant = {"split_tokens": SPLIT_TOKENS}
    alone: tuple[dict[str, Any], ...] = ({}, {"copy_pages": False}, invariant)
    for dtype, dim in product(("bf16", "fp16"), _FURTHER_DIMS):
        for how in (*alone, {**invariant, "copy_pages": False}, {"cluster": 2}):
            yield AttentionDecode(dtype=dtype, head_dim=dim, **how)
        if dim <= 128:
            yield AttentionDecode(dtype=dtype, head_dim=dim, cluster=8)
        if 64 < dim <= 128:
            yield AttentionDecode(dtype=dtype, head_dim=dim, cluster=4, **invariant)
        for keys in ("packed", "pages", "slots"):
            yield AttentionPrefill(dtype=dtype, head_dim=dim, keys=keys)
    for dim, kv_dtype in product((16, 80), OPERAND_DTYPES):
        for how in (*alone, {"cluster": 2}, {"cluster": 8}):
            yield AttentionDecode(dtype="bf16", kv_dtype=kv_dtype, head_dim=dim, **how)
    for dim, columns, how in product((16, 32), (16, 32, 64), alone):
        yield AttentionDecode(dtype="bf16", head_dim=dim, columns=columns, **how)
    for (dim, value_dim), dtype in product(((64, 128), (96, 64)), ("bf16", "fp16")):
        for keys in ("packed", "pages", "slots"):
            yield AttentionPrefill(dtype=dtype, head_dim=dim, value_dim=value_dim, keys=keys)
