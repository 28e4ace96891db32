"""Checkpoints in each quantised format, and fake-quantised transformers models to compare with."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hf_models import TOKENS, config_of, hf_logits, save, tensors_of
from linear_experts import file_name, with_linear_experts
from torch import nn
from transformers import PreTrainedModel

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# By how much a module's static range is wider than what was observed: it differs between the
# modules that the runtime joins, so that joining has something to do.
MARGINS = {"q_proj": 1.0, "k_proj": 1.3, "v_proj": 0.9, "gate_proj": 1.1, "up_proj": 0.8}

# Of activations that are quantised at run time, the second with zero points.
DYNAMIC = ("token", "asymmetric-token")


@dataclass(frozen=True)
class Format:
    """A way to store W8A8 layers. `inputs` is one of `DYNAMIC`, "tensor" or "asymmetric"."""

    dtype: torch.dtype
    per_channel: bool
    inputs: str
    config: dict[str, Any]
    scale_dtype: torch.dtype = torch.float32
    suffixes: tuple[str, str] = ("weight_scale", "input_scale")
    scalar_shape: tuple[int, ...] = (1,)
    file: str = "config.json"
    skipped: tuple[str, ...] = ("lm_head",)

    @property
    def grid_max(self) -> float:
        return 127.0 if self.dtype is torch.int8 else 448.0

    @property
    def static_max(self) -> float:
        """What compressed-tensors divides the largest activation by: half of -128 to 127."""
        return 127.5 if self.dtype is torch.int8 else 448.0


def compressed_tensors(
    kind: str, weights: str, inputs: str, *, name: str | None = None, **fields: Any
) -> dict[str, Any]:
    """Return a compressed-tensors configuration. `inputs` as in `Format`."""
    dynamic = inputs in DYNAMIC
    activations = {
        "num_bits": 8,
        "type": kind,
        "strategy": "token" if dynamic else "tensor",
        "dynamic": dynamic,
        "symmetric": not inputs.startswith("asymmetric"),
    }
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 8,
            "type": kind,
            "strategy": weights,
            "symmetric": True,
            "dynamic": False,
            "group_size": None,
            "observer": "minmax",
        },
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name or f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **fields,
    }


# Where transformers puts the modules of other towers than the text tower.
OTHER_TOWERS = ("model.visual", "model.vision_tower", "model.multi_modal_projector")

# Which a quantiser leaves as they are.
GATES = ("shared_expert_gate", "gate.wg")

# Relative to a row's largest activation. What is seen after two layers is about 3e-7.
FP32_NOISE = 1e-6
# After GELU without a gate, in whose tail numbers have errors as small as they are themselves:
# relative to a number, and what the rounding of 1 + erf adds to all.
AFTER_GELU, GELU_NOISE, GELU_ROUNDING = ("mlp.c_proj", "mlp.fc2"), 2e-5, 1e-7
# In units of a row's scale: the step of E4M3's smallest codes, which changes logits by some 1e-5.
# Functions such as GELU, which are next to 0 for most negative numbers, make many of them.
NO_STEP = 2.0**-9

INT8, E4M3 = torch.int8, torch.float8_e4m3fn

FORMATS: dict[str, Format] = {
    "ct-int8-dynamic": Format(INT8, True, "token", compressed_tensors("int", "channel", "token")),
    "ct-int8-dynamic-bf16-scales": Format(
        INT8,
        True,
        "token",
        compressed_tensors("int", "channel", "token", quantization_status="frozen"),
        scale_dtype=torch.bfloat16,
    ),
    "ct-int8-dynamic-tensor-weights": Format(
        INT8, False, "token", compressed_tensors("int", "tensor", "token", name="naive-quantized")
    ),
    "ct-int8-static": Format(INT8, True, "tensor", compressed_tensors("int", "channel", "tensor")),
    "ct-int8-asymmetric": Format(
        INT8, True, "asymmetric", compressed_tensors("int", "channel", "asymmetric")
    ),
    "ct-int8-asymmetric-tensor-weights": Format(
        INT8, False, "asymmetric", compressed_tensors("int", "tensor", "asymmetric")
    ),
    "ct-int8-with-lm-head": Format(
        INT8, True, "token", compressed_tensors("int", "channel", "token", ignore=[]), skipped=()
    ),
    "ct-fp8-dynamic": Format(E4M3, True, "token", compressed_tensors("float", "channel", "token")),
    "ct-fp8-static": Format(E4M3, False, "tensor", compressed_tensors("float", "tensor", "tensor")),
    "hf-fp8-dynamic": Format(
        E4M3,
        False,
        "token",
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        scalar_shape=(),
    ),
    "hf-fp8-static": Format(
        E4M3,
        False,
        "tensor",
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "model.layers.1.mlp.down_proj"],
        },
        scalar_shape=(),
        skipped=("lm_head", "model.layers.1.mlp.down_proj"),
    ),
    "hf-fp8-transformers": Format(
        E4M3,
        False,
        "tensor",
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "dequantize": False,
            "modules_to_not_convert": ["lm_head", "model.layers.0", "layers.1.self_attn.o_proj"],
        },
        suffixes=("weight_scale_inv", "activation_scale"),
        scalar_shape=(),
        skipped=("lm_head", "model.layers.0.", "model.layers.1.self_attn.o_proj"),
    ),
    "modelopt-fp8": Format(
        E4M3,
        False,
        "tensor",
        {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head", "model.layers.0*"],
        },
        scalar_shape=(),
        file="hf_quant_config.json",
        skipped=("lm_head", "model.layers.0."),
    ),
    "modelopt-fp8-config": Format(
        E4M3,
        False,
        "tensor",
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "producer": {"name": "modelopt", "version": "0.39.0"},
            "config_groups": {"group_0": {"targets": ["Linear"]}},
            "ignore": ["lm_head"],
        },
        scalar_shape=(),
    ),
}


# Formats of which no logits are recorded: layers are stored as those of a format above, under other
# names of fields, or quantise activations in another way.
SPELLINGS: dict[str, Format] = {
    "ct-int8-asymmetric-dynamic": Format(
        INT8, True, "asymmetric-token", compressed_tensors("int", "channel", "asymmetric-token")
    ),
    "modelopt-fp8-per-token": Format(
        E4M3,
        True,
        "token",
        {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]},
        file="hf_quant_config.json",
    ),
    "modelopt-int8": Format(
        INT8,
        True,
        "tensor",
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL", "ignore": ["lm_head"]},
        scalar_shape=(),
    ),
    "fbgemm-fp8": Format(
        E4M3,
        True,
        "token",
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head", "model.layers.0", "layers.1.self_attn.o_proj"],
        },
        skipped=("lm_head", "model.layers.0.", "model.layers.1.self_attn.o_proj"),
    ),
}


@dataclass
class Module:
    """One quantised linear module: what the file holds of it."""

    weight: torch.Tensor
    weight_scale: torch.Tensor  # [N] or [1]
    input_scale: torch.Tensor | None = None  # [1]
    zero_point: torch.Tensor | None = None  # [1] int8


@dataclass
class QuantizedFile:
    """A checkpoint folder, its quantised modules, and the transformers model it was made from."""

    folder: Path
    format: Format
    plain: PreTrainedModel
    modules: dict[str, Module] = field(default_factory=dict)

    def fused(self, names: Sequence[str]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (scale, zero point) of the activations of modules that the runtime joins."""
        parts = [self.modules[name] for name in names]
        if parts[0].input_scale is None:
            return None, None
        scales = torch.cat([part.input_scale for part in parts if part.input_scale is not None])
        if parts[0].zero_point is None:
            return scales.max(), None
        zeros = torch.cat([part.zero_point for part in parts if part.zero_point is not None])
        if len(parts) == 1:
            return scales[0], zeros[0].int()
        low = (scales * (-128.0 - zeros)).min()
        high = (scales * (127.0 - zeros)).max()
        scale = (high - low) / 255
        return scale, torch.round(-128 - low / scale).int()

    def twin(self) -> PreTrainedModel:
        """Return the transformers model with its quantised modules fake-quantised in fp32."""
        model = copy.deepcopy(self.plain)
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            group = next((g for g in FUSED if child in g), (child,))
            prefix = f"{parent}." if parent else ""
            names = [prefix + sibling for sibling in group]
            scale, zero = self.fused([sibling for sibling in names if sibling in self.modules])
            bias = model.get_submodule(name).bias
            replacement = FakeQuantLinear(module, self.format, scale, zero, bias)
            replacement.after_gelu = name.endswith(AFTER_GELU)
            setattr(model.get_submodule(parent), child, replacement)
        return model


class FakeQuantLinear(nn.Module):
    """What a W8A8 layer computes, in the words of its definition.

    `fragile` becomes True when an activation lies so close to the border between two codes that
    another order of fp32 additions could round it to the other one.
    """

    fragile = False
    after_gelu = False

    def __init__(
        self,
        module: Module,
        form: Format,
        scale: torch.Tensor | None,
        zero: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.weight = module.weight.double() * module.weight_scale.double().reshape(-1, 1)
        self.form, self.scale, self.zero, self.bias = form, scale, zero, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        amax = x.abs().amax(-1, keepdim=True)
        scale, zero = self.scale, 0 if self.zero is None else self.zero
        noise = FP32_NOISE * amax
        if self.after_gelu:
            noise = GELU_ROUNDING * amax + GELU_NOISE * x.abs()
        if self.form.inputs == "asymmetric-token":
            low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
            scale = (high - low) / 255
            exact = -128 - low / scale
            zero = exact.round()
            most = noise.amax(-1, keepdim=True) / scale
            self.fragile |= not torch.equal((exact + most).round(), (exact - most).round())
        elif scale is None:
            scale = amax / self.form.grid_max
        codes = self.encode(x / scale, zero)
        nudge = noise / scale
        steps = self.encode(x / scale + nudge, zero) - self.encode(x / scale - nudge, zero)
        self.fragile |= bool((steps.abs() > NO_STEP).any())
        y = scale.double() * (codes @ self.weight.T)
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def encode(self, x: torch.Tensor, zero: torch.Tensor | int) -> torch.Tensor:
        limit = self.form.grid_max
        if self.form.dtype is E4M3:
            return x.clamp(-limit, limit).to(E4M3).double()
        return (x.round() + zero).clamp(-128, 127).double() - zero


def sturdy_tokens(twin: PreTrainedModel, length: int = 6) -> list[int]:
    """Return a prompt of which no activation is fragile: then no rounding can differ."""
    layers = [module for module in twin.modules() if isinstance(module, FakeQuantLinear)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        prompt = torch.randint(
            twin.config.get_text_config().vocab_size, (length,), generator=generator
        ).tolist()
        for layer in layers:
            layer.fragile = False
        hf_logits(twin, prompt)
        if not any(layer.fragile for layer in layers):
            return prompt
    raise AssertionError("every prompt has an activation on a rounding border")


def write_quantized(
    folder: Path, plain: PreTrainedModel, form: Format, margins: Mapping[str, float] = MARGINS
) -> QuantizedFile:
    """Quantise a model into a checkpoint folder of the given format."""
    plain = with_linear_experts(plain)
    ranges = observe(plain)
    tensors = tensors_of(plain)
    result = QuantizedFile(folder, form, plain)
    for name, linear in plain.named_modules():
        if not isinstance(linear, nn.Linear) or name.startswith((*form.skipped, *OTHER_TOWERS)):
            continue
        if name.endswith(GATES):
            continue
        module = quantize(linear.weight.data, form)
        child = name.rpartition(".")[2]
        if form.inputs not in DYNAMIC:
            low, high = (margins.get(child, 1.0) * bound for bound in ranges[name])
            if form.inputs == "asymmetric":
                module.input_scale = torch.tensor([(high - low) / 255])
                zero = -128 - low / module.input_scale
                module.zero_point = zero.round().to(torch.int8)
            else:
                module.input_scale = torch.tensor([max(high, -low) / form.static_max])
        result.modules[name] = module
        tensors.update(stored(file_name(plain, name), module, form))
    config = config_of(plain)
    if form.file == "config.json":
        config["quantization_config"] = form.config
    save(folder, config, tensors)
    if form.file != "config.json":
        text = json.dumps({"producer": {"name": "modelopt"}, "quantization": form.config})
        (folder / form.file).write_text(text)
    return result


def quantize(weight: torch.Tensor, form: Format) -> Module:
    amax = weight.abs().amax(1) if form.per_channel else weight.abs().amax().reshape(1)
    scale = (amax / form.grid_max).to(form.scale_dtype).float()
    codes = (weight / scale[:, None]).clamp(-form.grid_max, form.grid_max)
    codes = codes.round() if form.dtype is INT8 else codes
    return Module(codes.to(form.dtype), scale)


def stored(name: str, module: Module, form: Format) -> dict[str, torch.Tensor]:
    """Return the tensors of a module as the format spells and shapes them."""
    weight_scale, input_scale = (f"{name}.{suffix}" for suffix in form.suffixes)
    shape = (-1, 1) if form.per_channel else form.scalar_shape
    tensors = {
        f"{name}.weight": module.weight,
        weight_scale: module.weight_scale.to(form.scale_dtype).reshape(shape),
    }
    if module.input_scale is not None:
        tensors[input_scale] = module.input_scale.reshape(form.scalar_shape)
    if module.zero_point is not None:
        tensors[f"{name}.input_zero_point"] = module.zero_point
    return tensors


def observe(model: PreTrainedModel) -> dict[str, tuple[float, float]]:
    """Return the least and the largest input of every linear module over `TOKENS`."""
    ranges: dict[str, tuple[float, float]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def record(_module: nn.Module, args: tuple[torch.Tensor], name: str = name) -> None:
                ranges[name] = (float(args[0].min()), float(args[0].max()))

            handles.append(module.register_forward_pre_hook(record))
    hf_logits(model, TOKENS)
    for handle in handles:
        handle.remove()
    return ranges
