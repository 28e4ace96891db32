"""Train the tiny Llama of examples/tiny-llama on Python's own documentation, on a CPU, in minutes.

    python examples/train_tiny.py --out DIR [--steps N] [--seed S] [--threads T]

writes a Hugging Face folder (bf16 safetensors, tokenizer, configs) and training_log.json: what it
was trained on and with, and its losses. The same seed, Python, torch and number of threads give
the same weights. `examples/evaluate_tiny.py` measures the result.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_corpus import END_OF_TEXT, HELD_OUT_TOPICS, sha256_of, split_corpus, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn


@dataclass(frozen=True)
class TinyConfig:
    """Shape of the model; the defaults make a checkpoint of less than 5 MB in INT8."""

    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    context: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_hf(self, end_of_text_id: int) -> dict[str, object]:
        """Return the model as a Hugging Face config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": end_of_text_id,
            "eos_token_id": end_of_text_id,
        }


@dataclass(frozen=True)
class Recipe:
    """How the model is trained: AdamW with linear warm-up and a cosine down to zero."""

    steps: int = 1800
    batch_size: int = 2
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    dropout: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embedding, halves rotated."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: TinyConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """What Hugging Face calls `model`: everything up to the final norm."""

    def __init__(self, config: TinyConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, dropout) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyLlama(nn.Module):
    """A Llama with tied embeddings whose `state_dict` has the Hugging Face tensor names."""

    def __init__(self, config: TinyConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dropout)
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(config.context), config.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        for name, parameter in self.model.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # Every layer starts as the identity, which makes a high learning rate safe.
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.04)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, length, vocab] of `tokens` [batch, length <= context]."""
        cos, sin = self.cos[: tokens.size(1)], self.sin[: tokens.size(1)]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021) to x [..., length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def train(
    config: TinyConfig,
    recipe: Recipe,
    tokens: Tensor,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> TinyLlama:
    """Train on `tokens` [n] int64; `report(step, loss)` is called after every step.

    Windows of `context` tokens start anywhere in the text, so that the model learns to go on from
    the middle of a topic as well as from its title. Raises `ValueError` when `tokens` is too short
    for one window.
    """
    if len(tokens) <= config.context:
        raise ValueError(
            f"tokens: got {len(tokens)}, expected more than the context of {config.context}"
        )
    torch.manual_seed(recipe.seed)
    model = TinyLlama(config, recipe.dropout)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.99),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, recipe))
    data_order = torch.Generator().manual_seed(recipe.seed)
    window = torch.arange(config.context + 1)
    for step in range(1, recipe.steps + 1):
        starts = torch.randint(
            len(tokens) - config.context, (recipe.batch_size, 1), generator=data_order
        )
        batch = tokens[starts + window]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        schedule.step()
        report(step, loss.item())
    return model.eval()


def lr_factor(step: int, recipe: Recipe) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a cosine to zero."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def save(model: TinyLlama, tokenizer: Tokenizer, out: Path) -> None:
    """Write `model` (rounded to bf16) and `tokenizer` as a Hugging Face folder."""
    out.mkdir(parents=True, exist_ok=True)
    end_of_text_id = tokenizer.token_to_id(END_OF_TEXT)
    weights = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "config.json", model.config.to_hf(end_of_text_id))
    write_json(
        out / "generation_config.json",
        {"bos_token_id": end_of_text_id, "eos_token_id": end_of_text_id},
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.context,
        },
    )


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Train, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    config, recipe = TinyConfig(), replace(Recipe(), steps=args.steps, seed=args.seed)
    train_text, _ = split_corpus()
    tokenizer = train_tokenizer(train_text, config.vocab_size)
    tokens = torch.tensor(tokenizer.encode(train_text).ids)
    print(f"{len(train_text)} characters, {len(tokens)} tokens")
    started = time.perf_counter()
    losses: dict[int, float] = {}

    def report(step: int, loss: float) -> None:
        if step % 50 == 0 or step == recipe.steps:
            losses[step] = round(loss, 4)
            seconds = time.perf_counter() - started
            print(f"step {step}/{recipe.steps}  loss {loss:.3f}  {seconds:.0f} s", flush=True)

    save(train(config, recipe, tokens, report), tokenizer, args.out)
    log = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "threads": args.threads,
        "corpus_sha256": sha256_of(train_text),
        "held_out_topics": list(HELD_OUT_TOPICS),
        "model": asdict(config),
        "recipe": asdict(recipe),
        "seconds": round(time.perf_counter() - started),
        "losses": losses,
    }
    write_json(args.out / "training_log.json", log)


if __name__ == "__main__":
    main()
