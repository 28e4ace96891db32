"""GraphRunner in somebody's own decode loop: a small recurrent step, and no engine or model.

Run it with `python examples/decode_loop.py`: on a GPU the step is replayed from CUDA graphs, on a
CPU it is called, and the loop is the same. The weights are random, and so are the tokens.
"""

from collections.abc import Callable

import torch

from ostinato import graphs

VOCAB, HIDDEN, MAX_LENGTH, SLOTS = 64, 128, 32, 6
PROMPTS = [[5, 17, 3], [42], [9, 9, 8, 7], [30, 2], [1, 2, 3, 4, 5], [60]]


class RecurrentStep:
    """One token per sequence in, the likeliest next token out."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCAB, HIDDEN, device=device)
        self.head = torch.randn(HIDDEN, VOCAB, device=device)
        self.recurrent = torch.randn(HIDDEN, HIDDEN, device=device) / HIDDEN**0.5
        # Static state, read at one position and written at the next, as a KV cache is: a step that
        # changed what it reads could not be called twice, so not be verified. Slot 0 is padding's.
        self.states = torch.zeros(SLOTS + 1, MAX_LENGTH + 1, HIDDEN, device=device)

    def buffer_specs(self) -> dict[str, graphs.BufferSpec]:
        """Return the inputs, with examples to verify; a padding row reads and writes slot 0."""

        def below(limit: int) -> Callable[..., torch.Tensor]:
            return lambda rng, shape: torch.randint(limit, shape, generator=rng)

        def distinct(rng: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
            return 1 + torch.randperm(SLOTS, generator=rng)[: shape[0]]

        return {
            "tokens": graphs.BufferSpec((), torch.int64, 0, below(VOCAB)),
            "positions": graphs.BufferSpec((), torch.int64, 0, below(MAX_LENGTH)),
            "slots": graphs.BufferSpec((), torch.int64, 0, distinct),
        }

    def __call__(self, batch: graphs.BatchView) -> dict[str, torch.Tensor]:
        """Advance every row of the batch by one token."""
        state = self.states[batch.slots, batch.positions]
        state = torch.tanh(state @ self.recurrent + self.embedding[batch.tokens])
        self.states[batch.slots, batch.positions + 1] = state
        logits = state @ self.head
        return {"tokens": logits.argmax(-1), "logits": logits}


def main() -> None:
    """Decode all prompts together: step by step as long as there are prompts, then in a burst."""
    step = RecurrentStep(device := torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    buffers = graphs.StaticBuffers(step.buffer_specs(), max_batch=SLOTS, device=device)
    rules = graphs.BurstRules({"tokens": graphs.Feed("tokens"), "positions": graphs.Add()})
    sequences, longest = [list(prompt) for prompt in PROMPTS], max(map(len, PROMPTS))

    def inputs(position: int) -> dict[str, list[int]]:
        tokens = [sequence[position] for sequence in sequences]
        return {"tokens": tokens, "positions": [position] * SLOTS, "slots": [*range(1, SLOTS + 1)]}

    with graphs.GraphRunner(step, buffers, burst=rules) as runner:
        print(runner.capture())
        for position in range(longest - 1):
            tokens = runner.run(SLOTS, inputs(position))["tokens"]
            for sequence, token in zip(sequences, tokens.tolist(), strict=True):
                if position + 1 == len(sequence):  # past the prompt
                    sequence.append(token)
        limits = [len(prompt) + 4 * (i + 1) - longest for i, prompt in enumerate(PROMPTS)]
        burst = runner.burst(SLOTS, inputs(longest - 1), max(limits), limits=limits)
        for tokens in burst:  # as they come: one per row, None where the row has ended
            print(*tokens)
        for prompt, sequence, tokens in zip(PROMPTS, sequences, burst.tokens, strict=True):
            print(prompt, "->", sequence[len(prompt) :] + tokens)


if __name__ == "__main__":
    main()
