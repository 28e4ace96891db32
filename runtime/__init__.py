"""Ostinato: an inference runtime for LLM decode in which every step is captured once and replayed.

Sub-packages, lowest first: `ostinato.graphs` (capture and replay of any step function),
`ostinato.jit` (compiling and loading native code), `ostinato.ops` (attention, products in 8 and 16
bits, quantisation, experts, sampling), `ostinato.models` (decoders over a paged KV cache),
`ostinato.checkpoint` (Hugging Face folders in, model out), `ostinato.compat` (transformers, vLLM,
SGLang, flash-attn), `ostinato.parallel` (processes that serve one model), `ostinato.engine`
(continuous batching) and `ostinato.server` (OpenAI's API; used through `ostinato serve`).
"""

if __name__ != "ostinato":
    raise ImportError(
        f"this package is imported as 'ostinato', not {__name__!r}: "
        "install it with `pip install -e .` and `import ostinato`"
    )

__version__ = "0.2.0"
