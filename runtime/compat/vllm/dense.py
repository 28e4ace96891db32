"""16-bit linear layers by `ops.linear`: the option `--quantization ostinato` of vLLM.

It is no quantisation: vLLM lets other packages replace linear layers by that option alone. Linear
layers multiply packed 16-bit weights; embeddings, the output projection, experts and layers of
another dtype stay vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ... import ops
from ...ops.linear.gemm_variants import GemmTiled
from ...ops.linear.precompile import dense_layer_kernels
from .packed_layer import compile_ahead, hold_weight, rows_of, weight_of
from .support import runs_on
from .their_kernels import is_theirs

NAME = "ostinato"


def register() -> None:
    """Make the option known to vLLM, once."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(OstinatoConfig)


class OstinatoConfig(QuantizationConfig):
    """Linear layers of 16-bit models on our kernels."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OstinatoConfig:
        if config.get("quant_method") != NAME:
            raise ValueError(
                f"quantization: got {NAME} for a checkpoint of {config.get('quant_method')!r}, "
                "expected one without a quantization_config"
            )
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        if layer.params_dtype not in self.get_supported_act_dtypes():
            return UnquantizedLinearMethod()  # such as heads of pooling models, in fp32
        runs, reason = runs_on(GemmTiled, None)
        if not runs:
            raise ValueError(f"quantization: {NAME} {reason}")
        return OstinatoLinearMethod()


class OstinatoLinearMethod(LinearMethodBase):
    """A 16-bit weight, packed once it is loaded.

    It is no subclass of vLLM's method, since vLLM reads the weights of that itself.
    """

    create_weights = UnquantizedLinearMethod.create_weights
    theirs: UnquantizedLinearMethod | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        if is_theirs(layer, layer.weight):
            self.theirs = UnquantizedLinearMethod()
            self.theirs.process_weights_after_loading(layer)
            return
        weight = layer.weight.data
        compile_ahead(
            weight,
            lambda device: dense_layer_kernels(tuple(weight.shape), weight.dtype, device=device),
        )
        hold_weight(layer, "weight", weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.theirs is not None:
            theirs: torch.Tensor = self.theirs.apply(layer, x, bias)
            return theirs
        w = weight_of(layer, "weight")
        out = ops.linear(rows_of(x), w, bias=bias)
        return out.view(*x.shape[:-1], out.size(1))
