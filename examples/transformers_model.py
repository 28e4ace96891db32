"""A model of transformers under GraphRunner, with our attention, norms and cache.

python examples/transformers_model.py [FOLDER]    # of a checkpoint; default: a small random Llama
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ostinato.compat.transformers import RaggedStaticCache, replace_attention, replace_norms
from ostinato.graphs import BatchView, BufferSpec, GraphRunner, StaticBuffers

MAX_BATCH, MAX_LENGTH, STEPS = 4, 256, 12
PROMPTS = [[5, 17, 3], [42, 9], [9, 9, 8, 7]]
SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def load(device: str) -> PreTrainedModel:
    """Return the checkpoint that the command line names, or a small random model."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SMALL, dtype=dtype)
    return model.to(device).eval()


def main() -> None:
    """Capture the model's decode step, compute the prompts eagerly, decode by replays."""
    model = load("cuda" if torch.cuda.is_available() else "cpu")
    model.set_attn_implementation("ostinato")
    replace_norms(model)
    replace_attention(model)
    cache = RaggedStaticCache(model, max_batch=MAX_BATCH, max_length=MAX_LENGTH)

    def step(batch: BatchView) -> dict[str, torch.Tensor]:
        rows = cache.rows(batch.seq_lens)
        logits = model(
            batch.tokens[:, None], past_key_values=rows, position_ids=rows.position_ids
        ).logits
        return {"tokens": logits[:, -1].argmax(-1)}

    def tokens(rng: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(model.config.vocab_size, shape, generator=rng)

    def lengths(rng: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(1, cache.places, shape, generator=rng, dtype=torch.int32)

    specs = {
        "tokens": BufferSpec((), torch.int64, pad=0, example=tokens),
        "seq_lens": BufferSpec((), torch.int32, pad=0, example=lengths),
    }
    buffers = StaticBuffers(specs, MAX_BATCH, model.device)
    runner = GraphRunner(step, buffers, memory={"model": model, "cache": cache.tensors()})
    print(runner.capture())

    # Prompts are padded on the left.
    longest = max(map(len, PROMPTS))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS]
    ids = torch.tensor(padded, device=model.device)
    seq_lens = torch.tensor([*map(len, PROMPTS)], dtype=torch.int32, device=model.device)
    with torch.no_grad():
        rows = cache.rows(seq_lens, tokens=longest)
        logits = model(ids, past_key_values=rows, position_ids=rows.position_ids).logits
    found = [logits[:, -1].argmax(-1)]
    for _ in range(STEPS - 1):
        seq_lens = seq_lens + 1
        output = runner.run(len(PROMPTS), {"tokens": found[-1], "seq_lens": seq_lens})
        found.append(output["tokens"].clone())  # the next run overwrites the output
    for prompt, row in zip(PROMPTS, torch.stack(found, dim=1).tolist(), strict=True):
        print(f"{prompt} -> {row}")
    runner.close()


if __name__ == "__main__":
    main()
