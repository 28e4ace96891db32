"""LLaVA, LLaVA-NeXT and LLaVA-OneVision: the text tower is of any family."""

from __future__ import annotations

from ...registry import Tower, register

register(Tower("llava", ("LlavaForConditionalGeneration",), "llama", any_family=True))
register(Tower("llava_next", ("LlavaNextForConditionalGeneration",), "llama", any_family=True))
register(
    Tower("llava_onevision", ("LlavaOnevisionForConditionalGeneration",), "qwen2", any_family=True)
)
