"""Small random transformers models, and the checkpoint folders that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hf_experts import WITH_EXPERTS
from hf_shapes import IDS, SHAPE, SLIDING_FIRST, TIED, TOKENS, rope
from linear_experts import file_name
from safetensors.torch import save_file
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.core_model_loading import revert_weight_conversion

CORRECTION = "e_score_correction_bias"

# Vision towers as small as they can be.
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 8,
}
CLIP, SIGLIP, PIXTRAL = (
    {**VISION, "model_type": kind}
    for kind in ("clip_vision_model", "siglip_vision_model", "pixtral")
)
# Their sum is half of a head.
MROPE = {"mrope_section": [2, 1, 1]}


MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**TIED),
    "llama-biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-head-dim": LlamaConfig(**SHAPE, head_dim=16),
    "llama-linear": LlamaConfig(**SHAPE, rope_parameters=rope("linear", factor=2.0)),
    "llama-llama3": LlamaConfig(
        **SHAPE,
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama-yarn": LlamaConfig(
        **SHAPE,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-longrope": LlamaConfig(
        **SHAPE,
        # From the second token on, transformers takes the factors of long contexts as well.
        rope_parameters=rope(
            "longrope",
            short_factor=[1.0] * 4,
            long_factor=[1.0, 1.3, 2.0, 3.5],
            attention_factor=1.2,
            original_max_position_embeddings=1,
        ),
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=8),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-tied-window": Qwen2Config(
        **TIED,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-tied": Qwen3Config(**TIED, head_dim=8),
    "smollm3": SmolLM3Config(**SHAPE, **IDS, no_rope_layers=[0, 1]),
    "smollm3-tied-window": SmolLM3Config(
        **TIED, **IDS, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8
    ),
    "granite": GraniteConfig(
        **SHAPE,
        rms_norm_eps=0.05,  # so large that it counts beside the squares
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=1.6,
    ),
    "granite-tied": GraniteConfig(
        **TIED, attention_bias=True, mlp_bias=True, embedding_multiplier=3.0, logits_scaling=0.5
    ),
    "granite_swa": GraniteSWAConfig(
        **{**SHAPE, "num_hidden_layers": 3},
        **IDS,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        layer_rope_theta=[10000.0, 500.0, 0],
        attention_multiplier=0.3,
        residual_multiplier=0.5,
    ),
    "glm": GlmConfig(**SHAPE, **IDS, head_dim=16),
    "glm4": Glm4Config(**SHAPE, **IDS, head_dim=16),
    "helium": HeliumConfig(**SHAPE, **IDS, head_dim=8, attention_bias=True, mlp_bias=True),
    "ernie4_5": Ernie4_5Config(**TIED, **IDS, head_dim=16, use_bias=True),
    "ministral3": Ministral3Config(
        **SHAPE,
        **IDS,
        head_dim=16,
        rope_parameters=rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=8,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
    ),
    "olmo2": Olmo2Config(**SHAPE, **IDS),
    "olmo3": Olmo3Config(
        **SHAPE,
        **IDS,
        sliding_window=8,
        layer_types=SLIDING_FIRST,
        rope_parameters={
            "sliding_attention": rope("default"),
            "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=16),
        },
    ),
    "exaone4": Exaone4Config(**SHAPE, **IDS, sliding_window=8, layer_types=SLIDING_FIRST),
    "exaone4-full": Exaone4Config(
        **TIED, **IDS, sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "internlm3": InternLM3Config(
        **SHAPE, head_dim=16, qkv_bias=True, bias=True, rope_parameters=rope("dynamic", factor=6.0)
    ),
    "gemma": GemmaConfig(**TIED, **IDS, head_dim=16),
    "gemma-biases": GemmaConfig(**SHAPE, **IDS, head_dim=8, attention_bias=True),
    # Caps and a scale that change every logit; the window is crossed in the first layer.
    "gemma2": Gemma2Config(
        **TIED,
        **IDS,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "gemma2-uncapped": Gemma2Config(
        **SHAPE,
        **IDS,
        head_dim=16,
        sliding_window=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3_text": Gemma3TextConfig(
        **{**TIED, "num_key_value_heads": 1},
        **IDS,
        head_dim=16,
        sliding_window=8,
        layer_types=SLIDING_FIRST,
        query_pre_attn_scalar=24,
        final_logit_softcapping=3.0,
        rope_parameters={
            "sliding_attention": rope("default", rope_theta=100.0),
            "full_attention": rope("linear", rope_theta=1000.0, factor=4.0),
        },
    ),
    "hunyuan_v1_dense": HunYuanDenseV1Config(
        **SHAPE, **IDS, head_dim=16, rope_parameters=rope("dynamic", alpha=50.0, factor=1.0)
    ),
    "hunyuan_v1_dense-tied": HunYuanDenseV1Config(
        **TIED,
        **IDS,
        head_dim=8,
        attention_bias=True,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "iquestcoder": IQuestCoderConfig(**SHAPE, head_dim=16),
    "seed_oss": SeedOssConfig(**SHAPE, **IDS, head_dim=16, attention_out_bias=True),
    "ministral": MinistralConfig(**SHAPE, head_dim=16, sliding_window=8, layer_types=SLIDING_FIRST),
    "cwm": CwmConfig(
        **SHAPE,
        **IDS,
        head_dim=16,
        sliding_window=8,
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "phi3": Phi3Config(**SHAPE, **IDS),
    "phi3-window": Phi3Config(**SHAPE, **IDS, sliding_window=8),
    "phi3-mini": Phi3Config(
        **TIED,
        **IDS,
        original_max_position_embeddings=1,
        rope_parameters=rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0] * 3,
            long_factor=[1.0, 1.3, 2.5],
            attention_factor=1.2,
        ),
    ),
    "nemotron": NemotronConfig(**SHAPE, **IDS, head_dim=16, attention_bias=True, mlp_bias=True),
    "arcee": ArceeConfig(**SHAPE, **IDS, head_dim=8, mlp_bias=True),
    "jais2": Jais2Config(**SHAPE, **IDS),
    "starcoder2": Starcoder2Config(**SHAPE, **IDS),
    "starcoder2-tied-window": Starcoder2Config(
        **TIED, **IDS, sliding_window=8, use_bias=False, hidden_act="gelu"
    ),
    "stablelm": StableLmConfig(**SHAPE, **IDS, partial_rotary_factor=0.5, use_qkv_bias=True),
    "stablelm-parallel": StableLmConfig(
        **SHAPE, **IDS, partial_rotary_factor=0.5, use_parallel_residual=True, qk_layernorm=True
    ),
    "stablelm-qk-norm": StableLmConfig(
        **SHAPE, **IDS, partial_rotary_factor=0.25, qk_layernorm=True
    ),
    "cohere": CohereConfig(**TIED, **IDS, logit_scale=1.3, attention_bias=True),
    "cohere-qk-norm": CohereConfig(**SHAPE, **IDS, logit_scale=0.5, use_qk_norm=True),
    "cohere2": Cohere2Config(
        **TIED, **IDS, logit_scale=0.5, sliding_window=8, layer_types=SLIDING_FIRST
    ),
    "phi": PhiConfig(**SHAPE, **IDS),
    "qwen2_vl": Qwen2VLConfig(
        text_config={**SHAPE, **IDS, "rope_parameters": rope("default", **MROPE)},
        vision_config={**QWEN_VISION, "embed_dim": 16, "mlp_ratio": 1, "hidden_size": 32},
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={
            **SHAPE,
            **IDS,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "rope_parameters": rope(
                "yarn", factor=4.0, original_max_position_embeddings=16, **MROPE
            ),
        },
        vision_config={**QWEN_VISION, "intermediate_size": 16, "out_hidden_size": 32},
        tie_word_embeddings=True,
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={
            **SHAPE,
            **IDS,
            "head_dim": 8,
            "rope_parameters": rope("default", mrope_interleaved=True, **MROPE),
        },
        vision_config={
            **QWEN_VISION,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
    "gemma3": Gemma3Config(
        text_config={
            **TIED,
            **IDS,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": SLIDING_FIRST,
        },
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
    ),
    "mistral3": Mistral3Config(
        text_config=MistralConfig(**SHAPE, head_dim=16, sliding_window=None).to_dict(),
        vision_config={**PIXTRAL, "head_dim": 8},
        tie_word_embeddings=False,
    ),
    "llava": LlavaConfig(text_config=LlamaConfig(**SHAPE).to_dict(), vision_config=CLIP),
    "llava-mistral": LlavaConfig(
        text_config=MistralConfig(**SHAPE, sliding_window=8).to_dict(), vision_config=CLIP
    ),
    "llava_next": LlavaNextConfig(text_config=LlamaConfig(**SHAPE).to_dict(), vision_config=CLIP),
    "llava_onevision": LlavaOnevisionConfig(
        text_config=Qwen2Config(**TIED).to_dict(), vision_config=SIGLIP, tie_word_embeddings=True
    ),
    **WITH_EXPERTS,
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config={
            **SHAPE,
            **IDS,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "rope_parameters": rope("default", mrope_interleaved=True, **MROPE),
        },
        vision_config={
            **QWEN_VISION,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
}


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return an fp32 model whose every parameter, biases and norms included, is random."""
    several_towers = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if several_towers else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    # Gemma's norms are stored less 1.
    mean = 0 if config.get_text_config().model_type.startswith("gemma") else 1
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = mean + 0.2 * values
        elif parameter.ndim >= 2:
            values *= 1.5 / parameter.shape[-1] ** 0.5
        parameter.data = values
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.tie_weights()
    return model


def tensors_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the tensors a checkpoint of the model holds; tied weights are there once."""
    state = model.state_dict()
    if hasattr(model.config.get_text_config(), "num_experts_per_tok"):
        state = revert_weight_conversion(model, state)  # experts one by one, under older names
    tensors = {
        file_name(model, name): tensor.to(
            torch.float32 if name.endswith(CORRECTION) else dtype
        ).contiguous()
        for name, tensor in state.items()
    }
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def config_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the contents of the model's `config.json`."""
    name = type(model).__name__
    return {
        **model.config.to_dict(),
        "architectures": [name],
        "dtype": str(dtype).removeprefix("torch."),
    }


def save(folder: Path, config: dict[str, Any], *shards: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint folder: one file, or a file per shard and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [
        f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))
    ]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_plain(folder: Path, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Path:
    return save(folder, config_of(model, dtype), tensors_of(model, dtype))


@torch.no_grad()
def hf_logits(model: PreTrainedModel, tokens: list[int] = TOKENS) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()
