"""The decoder of the Llama family and the paged KV cache it runs over."""

from .cache import (
    PagedKVCache,
    SwappedSequence,
)
from .config import ModelConfig
from .config_fields import UnsupportedModelError
from .layers import (
    AnyLinear,
    Linear,
    Sampling,
    W8A8Linear,
)
from .llama import (
    AttentionInputs,
    DecoderLayer,
    Llama,
    SeenRows,
)
from .pages import (
    DUMMY_PAGE,
    OutOfPagesError,
)
from .required_kernels import compile_kernels
from .rope import RopeConfig
from .scoring import sequence_logits

__all__ = [
    "DUMMY_PAGE",
    "AnyLinear",
    "AttentionInputs",
    "DecoderLayer",
    "Linear",
    "Llama",
    "ModelConfig",
    "OutOfPagesError",
    "PagedKVCache",
    "RopeConfig",
    "Sampling",
    "SeenRows",
    "SwappedSequence",
    "UnsupportedModelError",
    "W8A8Linear",
    "compile_kernels",
    "sequence_logits",
]
