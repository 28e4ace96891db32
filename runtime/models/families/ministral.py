"""Ministral: Mistral under another name, most often with windows in some layers only."""

from __future__ import annotations

from ..registry import Family, register
from .llama import Llama, layout
from .mistral import DEFAULTS, mistral_config

register(
    Family(
        "ministral",
        ("MinistralForCausalLM",),
        mistral_config,
        layout,
        Llama.load,
        defaults=DEFAULTS,
    )
)
