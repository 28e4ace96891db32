"""Prefill and decode with continuous batching, over a `GraphRunner`."""

from ostinato.engine.engine import Engine, Prompt
from ostinato.engine.params import Completion, FinishReason, SamplingParams, TokenEvent
from ostinato.engine.stats import EngineStats
from ostinato.engine.stream import TokenStream

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Prompt",
    "SamplingParams",
    "TokenEvent",
    "TokenStream",
]
