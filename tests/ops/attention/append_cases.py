"""Calls of `append_kv` of every kind, shared by the GPU tests of its kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from ops_cases import laid_out

GPU = torch.device("cuda")
WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale", "k_scale_out", "v_scale_out")


@dataclass(frozen=True)
class Case:
    """One call of `append_kv`; `rotary_dim` 0 means none, `scales` are the kinds of k's and v's.

    They are one, head, token, or "shown": one for each head, and written for each token.
    """

    tokens: int = 9
    heads_q: int = 6
    heads_kv: int = 2
    dim: int = 128
    rotary_dim: int = -1
    interleaved: bool = False
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    scales: tuple[str, str] = ("token", "token")
    norms: tuple[str, str] = ("", "")
    norm_after_rotation: bool = False
    layout: str = "dense"
    page_size: int = 5

    def build(self) -> dict[str, Any]:
        """Return arguments on the CPU; a fifth of the tokens has no slot."""
        pages = -(-self.tokens // self.page_size) + 2
        fused = torch.randn(self.tokens, self.heads_q + 2 * self.heads_kv, self.dim) * 3
        q, k, v = fused.to(self.dtype).split([self.heads_q, self.heads_kv, self.heads_kv], dim=1)
        cache_dtype = self.cache_dtype or self.dtype
        cache = torch.full((pages, self.page_size, self.heads_kv, self.dim), 3.0).to(cache_dtype)
        slots = torch.randperm(pages * self.page_size)[: self.tokens]
        slots[torch.rand(self.tokens) < 0.2] = -1
        arguments: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "k_cache": laid_out(cache, self.layout),
            "v_cache": laid_out(cache.clone(), self.layout),
            "slot_mapping": slots,
            "interleaved": self.interleaved,
            "norm_after_rotation": self.norm_after_rotation,
        }
        rotary_dim = self.dim // 2 * 2 if self.rotary_dim < 0 else self.rotary_dim
        if rotary_dim:
            angles = torch.randn(40, rotary_dim // 2) * 9
            arguments["cos_sin"] = torch.cat([angles.cos(), angles.sin()], dim=1)
            arguments["positions"] = torch.randint(40, (self.tokens,), dtype=torch.int32)
        for name, norm in zip(("q_norm_weight", "k_norm_weight"), self.norms, strict=True):
            if norm:
                weight = torch.randn(self.dim)
                arguments[name] = weight.to(self.dtype) if norm == "same" else weight
        shapes = {"one": (), "head": (self.heads_kv,), "token": cache.shape[:3]}
        shapes["shown"] = shapes["head"]
        if cache_dtype.itemsize == 1:
            for name, kind in zip(("k_scale", "v_scale"), self.scales, strict=True):
                arguments[name] = torch.rand(shapes[kind]) / 50 + 0.01
                if kind == "shown":
                    arguments[f"{name}_out"] = torch.full(shapes["token"], 2.0)
        return arguments

    def __str__(self) -> str:
        plain = vars(Case())
        fields = {k: v for k, v in vars(self).items() if v != plain[k]}
        return ",".join(f"{k}={v}" for k, v in fields.items()) or "plain"


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return copies on the GPU, laid out as they were."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        base = x if x._base is None else x._base
        return base.to(GPU, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())

    return {k: moved(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def written_copies(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the caches and their scales."""
    return {name: arguments[name].clone() for name in WRITTEN if name in arguments}
