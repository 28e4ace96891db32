"""Checkpoints with FP8 weights in blocks of 128, and fake-quantised models to compare with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hf_models import config_of, save, tensors_of
from linear_experts import file_name, with_linear_experts
from quantized_files import E4M3, FP32_NOISE, GATES, FakeQuantLinear
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

BLOCK = 128

# No size is a multiple of a block, and joined modules end within one.
_SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 160,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 20,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**_SHAPE, bos_token_id=1, eos_token_id=2, pad_token_id=None),
}
# Of whole blocks: compressed-tensors has no others.
WHOLE_BLOCKS = LlamaConfig(
    **{
        **_SHAPE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
)


@dataclass(frozen=True)
class BlockFormat:
    """A spelling of block FP8: the configuration, and the names and shapes of scales."""

    config: dict[str, Any]
    scale_dtype: torch.dtype = torch.float32
    suffix: str = "weight_scale_inv"
    four_dimensions: bool = False
    power_of_two: bool = False
    file: str = "config.json"
    skipped: tuple[str, ...] = ("lm_head",)


def hf(**fields: Any) -> dict[str, Any]:
    """Return a configuration as Qwen, DeepSeek and transformers write it."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        **fields,
    }


def compressed_tensors(
    weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the configuration of llm-compressor's FP8_BLOCK, with fields changed."""
    common: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "actorder": None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": {
            **common,
            "strategy": "block",
            "block_structure": [BLOCK, BLOCK],
            "group_size": None,
            "dynamic": False,
            "observer": "static_minmax",
            **(weights or {}),
        },
        "input_activations": {
            **common,
            "strategy": "group",
            "block_structure": None,
            "group_size": BLOCK,
            "dynamic": True,
            "observer": None,
            **(activations or {}),
        },
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    }


FORMATS: dict[str, BlockFormat] = {
    # As of Qwen3-8B-FP8, whose list names modules that are not linear, too.
    "hf": BlockFormat(
        hf(
            fmt="e4m3",
            modules_to_not_convert=[
                "lm_head",
                "model.layers.0.input_layernorm",
                "model.layers.0.mlp.down_proj",
            ],
        ),
        scale_dtype=torch.bfloat16,
        skipped=("lm_head", "model.layers.0.mlp.down_proj"),
    ),
    "hf-ue8m0": BlockFormat(hf(scale_fmt="ue8m0"), power_of_two=True),  # DeepSeek-V3.1
    "hf-minimax": BlockFormat(hf(fmt="float8_e4m3fn", modules_to_not_convert=["lm_head"])),
    "compressed-tensors": BlockFormat(
        compressed_tensors(), scale_dtype=torch.bfloat16, suffix="weight_scale"
    ),
    "modelopt": BlockFormat(
        {
            "quant_algo": "FP8_PB_WO",
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head", "model.layers.0.self_attn*"],
        },
        suffix="weight_scale",
        four_dimensions=True,
        file="hf_quant_config.json",
        skipped=("lm_head", "model.layers.0.self_attn."),
    ),
}


@dataclass
class BlockFile:
    """A checkpoint folder, its quantised modules, and the transformers model it was made from."""

    folder: Path
    plain: PreTrainedModel
    form: BlockFormat
    modules: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def twin(self) -> PreTrainedModel:
        """Return the transformers model with its quantised modules fake-quantised in fp32."""
        model = copy.deepcopy(self.plain)
        for name, (codes, scales) in self.modules.items():
            parent, _, child = name.rpartition(".")
            bias = model.get_submodule(name).bias
            replacement = FakeBlockLinear(codes, scales, self.form.power_of_two, bias)
            setattr(model.get_submodule(parent), child, replacement)
        return model


class FakeBlockLinear(FakeQuantLinear):
    """What a block FP8 layer computes, in the words of its definition; see `FakeQuantLinear`."""

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        power_of_two: bool,
        bias: torch.Tensor | None,
    ) -> None:
        nn.Module.__init__(self)
        self.weight = codes.double() * of_blocks(scales.double(), codes.shape)
        self.power_of_two, self.bias = power_of_two, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = []
        for group in x.split(BLOCK, dim=-1):
            amax = group.abs().amax(-1, keepdim=True)
            scale = amax / 448
            if self.power_of_two:
                scale = scale.double().log2().ceil().exp2().float()
            codes, nudge = group / scale, FP32_NOISE * amax / scale
            self.fragile |= not torch.equal(_encoded(codes + nudge), _encoded(codes - nudge))
            rounded.append(scale.double() * _encoded(codes))
        y = torch.cat(rounded, dim=-1) @ self.weight.T
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def _encoded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(E4M3).double()


def of_blocks(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the scale of each element of a weight of this shape."""
    rows, columns = shape
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[:rows, :columns]


def write_blocks(
    folder: Path,
    plain: PreTrainedModel,
    form: BlockFormat,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> BlockFile:
    """Quantise a model into a checkpoint folder; `change` may alter its tensors."""
    plain = with_linear_experts(plain)
    tensors = tensors_of(plain)
    result = BlockFile(folder, plain, form)
    for name, linear in plain.named_modules():
        if isinstance(linear, nn.Linear) and not name.startswith(form.skipped):
            if name.endswith(GATES):
                continue
            codes, scales = _quantize(linear.weight.data, form)
            result.modules[name] = codes, scales
            stored = scales.to(form.scale_dtype)
            if form.four_dimensions:
                stored = stored[:, None, :, None].contiguous()
            name = file_name(plain, name)
            tensors |= {f"{name}.weight": codes, f"{name}.{form.suffix}": stored}
    change(tensors)
    config = config_of(plain)
    if form.file == "config.json":
        config["quantization_config"] = form.config
    save(folder, config, tensors)
    if form.file != "config.json":
        text = json.dumps({"producer": {"name": "modelopt"}, "quantization": form.config})
        (folder / form.file).write_text(text)
    return result


def _quantize(weight: torch.Tensor, form: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.stack(
        [
            torch.stack([block.abs().amax() / 448 for block in rows.split(BLOCK, 1)])
            for rows in weight.split(BLOCK)
        ]
    )
    scales = scales.to(form.scale_dtype).float()
    if form.power_of_two:
        scales = scales.log2().ceil().exp2()
    codes = (weight / of_blocks(scales, weight.shape)).clamp(-448, 448)
    return codes.to(E4M3), scales
