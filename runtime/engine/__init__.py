"""Prefill and decode with continuous batching, over a `GraphRunner`."""

from .engine import Engine
from .logprobs import TokenLogprobs
from .new_request import Prompt
from .sampling_params import Completion, FinishReason, SamplingParams, TokenEvent
from .stats import EngineStats
from .stream import TokenStream
from .structured.output import StructuredOutput

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Prompt",
    "SamplingParams",
    "StructuredOutput",
    "TokenEvent",
    "TokenLogprobs",
    "TokenStream",
]
