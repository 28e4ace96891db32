"""Prefill and decode with continuous batching, over a `GraphRunner`."""

from ostinato.engine.engine import Engine, EngineStats, Prompt
from ostinato.engine.params import Completion, FinishReason, SamplingParams, TokenEvent

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Prompt",
    "SamplingParams",
    "TokenEvent",
]
