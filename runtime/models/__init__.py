"""The decoder of the Llama family and the paged KV cache it runs over."""

from ostinato.model.cache import PagedKVCache, SwappedSequence
from ostinato.model.config import ModelConfig
from ostinato.model.fields import UnsupportedModelError
from ostinato.model.kernels import compile_kernels
from ostinato.model.layers import AnyLinear, Linear, Sampling, W8A8Linear
from ostinato.model.llama import AttentionInputs, DecoderLayer, Llama, SeenRows
from ostinato.model.pages import DUMMY_PAGE, OutOfPagesError
from ostinato.model.rope import RopeConfig
from ostinato.model.scoring import sequence_logits

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
