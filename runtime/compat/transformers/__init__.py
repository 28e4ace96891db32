"""Our attention for models of transformers: `attn_implementation="ostinato"`.

Importing this module registers `attention` and `lengths_mask` under that name, with every model
that looks its attention up in transformers' `AttentionInterface`, as nearly all do:

    import ostinato.compat.transformers
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ostinato")

A model's mask then is no tensor of queries times keys but how many keys each sequence has, computed
on the device from what the cache says: nothing is copied to the host, no keys are repeated for the
query heads that share them, and of a `StaticCache` only what it holds is read, so that a step can
be captured in a graph. `seq_lens=` of the model's call says it instead of the cache, for each
sequence by itself: a row of 0 attends to nothing and costs next to nothing, as the padding of a
batch should. `docs/graphs/transformers.md` has an example.

What would change the result and is not built is refused by name: dropout, attention weights as an
output, additive masks and biases, 2D masks with padding, packed sequences, chunked attention.
There is no backward pass.

`accelerate(model)` does all of what follows, as far as the model allows, and says what it did:

- `replace_linears(model)` multiplies the 8-bit weights of a quantised checkpoint on 8-bit kernels;
- `replace_norms(model)` lets `ostinato.ops.rms_norm` compute the RMS norms: one kernel each on a
  Hopper GPU;
- `replace_attention(model)` lets `ostinato.ops.append_kv` rotate queries and keys and fill a
  `RaggedStaticCache`: one kernel in each layer instead of eleven;
- `replace_batching(model)` lets transformers' continuous batching attend with our functions.
"""

from __future__ import annotations

from .attention_layers import replace_attention
from .batching import replace_batching
from .cache import NAME, RaggedStaticCache
from .interface import attention, lengths_mask
from .linear_module import QuantizedLinear
from .linears import replace_linears
from .norms import replace_norms
from .one_call import Report, accelerate

__all__ = [
    "NAME",
    "QuantizedLinear",
    "RaggedStaticCache",
    "Report",
    "accelerate",
    "attention",
    "lengths_mask",
    "replace_attention",
    "replace_batching",
    "replace_linears",
    "replace_norms",
]
