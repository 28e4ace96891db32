"""Decoders, by families that register themselves, and the paged KV cache they run over."""

from .asymmetric_linear import AsymmetricLinear
from .block_linear import BlockFP8Linear
from .cache import PagedKVCache, SwappedSequence
from .config import ModelConfig
from .config_fields import UnsupportedModelError
from .decoder import AttentionInputs, Decoder, SeenRows, TextRows
from .experts.config import ExpertsConfig
from .experts.products import BlockFP8Experts, DenseExperts, Experts, W8A8Experts
from .joined_linear import JoinedLinear
from .kv_format import KVFormat, KVScales, ScaleKind, kv_format
from .layers import DenseLinear, Linear, Sampling, W8A8Linear
from .pages import DUMMY_PAGE, OutOfPagesError
from .registry import decoder_fields, family_of, read_config
from .required_kernels import compile_kernels
from .rope import RopeConfig
from .scoring import sequence_logits

__all__ = [
    "DUMMY_PAGE",
    "AsymmetricLinear",
    "AttentionInputs",
    "BlockFP8Experts",
    "BlockFP8Linear",
    "Decoder",
    "DenseExperts",
    "DenseLinear",
    "Experts",
    "ExpertsConfig",
    "JoinedLinear",
    "KVFormat",
    "KVScales",
    "Linear",
    "ModelConfig",
    "OutOfPagesError",
    "PagedKVCache",
    "RopeConfig",
    "Sampling",
    "ScaleKind",
    "SeenRows",
    "SwappedSequence",
    "TextRows",
    "UnsupportedModelError",
    "W8A8Experts",
    "W8A8Linear",
    "compile_kernels",
    "decoder_fields",
    "family_of",
    "kv_format",
    "read_config",
    "sequence_logits",
]
