"""Prefill and decode with continuous batching, over a `GraphRunner`."""

from .engine import Engine
from .new_request import Prompt
from .sampling_params import Completion, FinishReason, SamplingParams, TokenEvent
from .stats import EngineStats
from .stream import TokenStream

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
