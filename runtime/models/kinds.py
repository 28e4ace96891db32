"""What comes before a linear layer, and is one kernel with the quantisation of its input."""

from __future__ import annotations

from typing import Literal

NormKind = Literal["rms_norm", "layer_norm"]

# Functions of x, and with _mul of [gate | up]; see `ops.activation`.
Activation = Literal[
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "silu_mul",
    "gelu_mul",
    "gelu_tanh_mul",
    "relu_mul",
    "relu2_mul",
]

# Norms named _fp32 have a weight in fp32, whatever the dtype of the model.
InputKind = Literal["per_token", "rms_norm_fp32", "layer_norm_fp32"] | NormKind | Activation
