"""Ostinato: an inference runtime for LLM decode in which every step is captured once and replayed.

Sub-packages, lowest first: `ostinato.graphs` (capture and replay of any step function),
`ostinato.jit` (compiling and loading native code), `ostinato.ops` (attention, W8A8 linear,
quantisation, sampling), `ostinato.models` (Llama-family decoder over a paged KV cache),
`ostinato.checkpoint` (Hugging Face folders in, model out) and `ostinato.engine` (continuous
batching).
"""

if __name__ != "ostinato":
    raise ImportError(
        f"this package is imported as 'ostinato', not {__name__!r}: "
        "install it with `pip install -e .` and `import ostinato`"
    )

__version__ = "0.2.0"
