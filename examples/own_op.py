"""An operator of one's own in a captured step: registered with torch, verified by the capture.

Run it with `python examples/own_op.py`. The operator may as well launch a kernel of a library: all
that it launches on the current stream becomes part of the graph.
"""

from __future__ import annotations

import torch

from ostinato.graphs import BatchView, BufferSpec, GraphRunner, StaticBuffers

VOCAB, HIDDEN, MAX_BATCH = 64, 32, 8


@torch.library.custom_op("example::clipped_softmax", mutates_args=())
def clipped_softmax(logits: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Stretch a softmax to the range low..high and clip it to 0..1.

    Args:
        logits: [rows, columns], floating point.
        low: at most 0.
        high: at least 1.

    Returns:
        Of the shape and dtype of `logits`.
    """
    if not low <= 0 <= 1 <= high:
        raise ValueError(f"low, high: got {low}, {high}, expected low <= 0 and high >= 1")
    return (logits.softmax(-1) * (high - low) + low).clamp(0, 1)


def examples(rng: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Return token ids with which a capture verifies its graphs."""
    return torch.randint(VOCAB, shape, generator=rng)


def main() -> None:
    """Capture a step with the operator in it, and run it for a batch of three."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN, device=device)

    def step(batch: BatchView) -> dict[str, torch.Tensor]:
        logits = embedding[batch.tokens] @ embedding.T
        return {"weights": clipped_softmax(logits, -0.1, 1.1)}

    specs = {"tokens": BufferSpec((), torch.int64, pad=0, example=examples)}
    with GraphRunner(step, StaticBuffers(specs, MAX_BATCH, device)) as runner:
        print(runner.capture())
        weights = runner.run(3, {"tokens": [5, 17, 42]})["weights"]
        print(f"largest weight of each row: {weights.argmax(-1).tolist()}")


if __name__ == "__main__":
    main()
