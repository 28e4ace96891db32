"""Qwen2-VL and Qwen2.5-VL: the text tower is Qwen2, with positions of three axes."""

from __future__ import annotations

from ...config import ModelConfig, mixed_windows, same_rope, standard_config
from ...config_fields import Fields
from ...registry import Family, Tower, register
from ..llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    ropes = same_rope(multimodal=True)
    return standard_config(fields, windows=mixed_windows, qkv_bias=True, o_bias=False, ropes=ropes)


_DEFAULTS = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
_TEXT_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 80,
}

for _name, _class in (("qwen2_vl", "Qwen2VL"), ("qwen2_5_vl", "Qwen2_5_VL")):
    _text = f"{_name}_text"
    register(
        Family(
            _text,
            (),
            _config,
            layout,
            Llama.load,
            defaults=_DEFAULTS,
            text_defaults=_TEXT_DEFAULTS,
        )
    )
    # The files of both have the text tower's fields beside those of the model.
    register(Tower(_name, (f"{_class}ForConditionalGeneration",), _text, flat=True))
