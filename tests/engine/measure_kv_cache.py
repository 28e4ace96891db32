"""Nats a token of a checkpoint over 8-bit KV caches, beside those of pages in the model's dtype.

    python tests/engine/measure_kv_cache.py FOLDER [--tokens 2000 8000] [--device D] [--json F]

Texts are Python's documentation topics, which are of every installation: one of each length, all
one after the other, each computed at once in a cache of its own. Static scales are found as
by `quantize --kv-cache --calibrate` in the text in front of these. `rise` is that of nats over
pages in the model's dtype, over the same text. It varies with the text; its expectation, were the
text written by the model over these pages, is `expected_rise`: the mean over positions of KL(p over
the model's dtype || p over 8 bits) by the same nats.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

from ostinato.bench.report import Report
from ostinato.checkpoint import load_config, load_model, load_tokenizer
from ostinato.checkpoint.calibration.kv_cache import calibrate_kv_cache
from ostinato.checkpoint.calibration.observe import observe, read_tokens
from ostinato.checkpoint.calibration.smooth import Smoothing
from ostinato.checkpoint.layout import checked_layout
from ostinato.checkpoint.quantization import load_quantization
from ostinato.checkpoint.reader import CheckpointReader
from ostinato.models import Decoder, KVFormat, KVScales, PagedKVCache, ScaleKind, kv_format
from ostinato.models.scoring import sequence_inputs

PAGE_SIZE = 16
ROWS = 256  # whose logits are computed at once
CALIBRATED = 8_000  # characters
CACHES: tuple[tuple[str, ScaleKind], ...] = (
    ("int8", "token"),
    ("fp8", "token"),
    ("int8", "static"),
    ("fp8", "static"),
)


@dataclass(frozen=True)
class NatsRow:
    """One text over one cache.

    Args:
        case: the model and the tokens of the text.
        impl: the cache, as a capture report calls it.
        nats: mean of -log p of each token after the first.
        rise: over pages in the model's dtype, as a fraction of it.
        expected_rise: its expectation over texts that the model writes.
        standard_error: of the latter.
    """

    case: str
    impl: str
    nats: float
    rise: float
    expected_rise: float
    standard_error: float
    section: str = "kv_cache_nats"


@torch.inference_mode()
def states(
    model: Decoder, tokens: Sequence[int], cache_format: KVFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the last layer makes of tokens, computed at once, for `Decoder.logits`."""
    cache = PagedKVCache.for_model(
        model.config,
        num_pages=1 + -(-len(tokens) // PAGE_SIZE),
        page_size=PAGE_SIZE,
        device=model.device,
        l2_partitioned=False,
        kv_format=cache_format,
    )
    return model.hidden(*sequence_inputs(cache, tokens), cache)


@torch.inference_mode()
def scores(
    model: Decoder,
    tokens: Sequence[int],
    of: tuple[torch.Tensor, torch.Tensor],
    exact: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -log p of each token after the first, and KL(exact p || p) there, [tokens - 1] fp64.

    Args:
        model: the decoder.
        tokens: of the text.
        of: their `states`.
        exact: those over another cache.
    """
    wanted = torch.tensor(tokens[1:], device=model.device)
    losses, divergences = [], []
    for at in range(0, len(wanted), ROWS):
        rows = slice(at, min(at + ROWS, len(wanted)))
        log_p, log_exact = (
            model.logits(x[rows], residual[rows]).log_softmax(-1) for x, residual in (of, exact)
        )
        losses.append(-log_p.gather(1, wanted[rows].unsqueeze(1)).squeeze(1).double())
        divergences.append((log_exact.exp() * (log_exact - log_p)).sum(1).double())
    return torch.cat(losses), torch.cat(divergences)


def expected_rise(exact: float, divergences: torch.Tensor) -> tuple[float, float]:
    """Return by how much of `exact` nats a token they rise, and the standard error of that."""
    error = float(divergences.std()) / len(divergences) ** 0.5
    return float(divergences.mean()) / exact, error / exact


def nats(model: Decoder, tokens: Sequence[int], cache_format: KVFormat) -> float:
    """Return the mean of -log p of each token after the first."""
    of = states(model, tokens, cache_format)
    return float(scores(model, tokens, of, of)[0].mean())


def static_scales(folder: Path, text: Path, device: torch.device) -> dict[str, KVScales]:
    """Return the scales of both dtypes that a text gives a checkpoint's cache."""
    config = load_config(folder)
    scheme_of = load_quantization(folder, text_tower=config.text_tower).scheme_of
    tokens = read_tokens(text, folder, config.vocab_size)
    with CheckpointReader(folder, text_tower=config.text_tower) as reader:
        layout = checked_layout(config, scheme_of)
        reader.check(layout.tensors(scheme_of))
        observed = observe(reader, config, layout, scheme_of, tokens, device=device)
    return {
        name: calibrate_kv_cache(observed.cache, dtype, layout, Smoothing())
        for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn))
    }


def measure(
    folder: Path, lengths: Sequence[int], device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[NatsRow]:
    """Yield the rows of all texts and caches.

    Args:
        folder: of the checkpoint, with a tokenizer.
        lengths: tokens of each text.
        device: where it is computed.
        dtype: as of `load_model`.

    Raises:
        ValueError: when the topics have too few tokens for all texts.
    """
    text = "\n".join(topics[name] for name in sorted(topics))
    with tempfile.TemporaryDirectory() as made:
        file = Path(made, "calibrated.txt")
        file.write_text(text[:CALIBRATED], encoding="utf-8")
        static = static_scales(folder, file, device)
    model = load_model(folder, device=device, dtype=dtype, max_context=max(lengths))
    tokens = load_tokenizer(folder).encode(text[CALIBRATED:]).ids
    if len(tokens) < sum(lengths):
        raise ValueError(f"lengths: got {lengths}, expected {len(tokens)} tokens at most")
    plain = KVFormat(model.config.dtype)
    first = 0
    for length in lengths:
        piece = tokens[first : first + length]
        first += length
        case, of_exact = f"{folder.name} {length} tokens", states(model, piece, plain)
        exact = float(scores(model, piece, of_exact, of_exact)[0].mean())
        yield NatsRow(case, str(plain), round(exact, 5), 0.0, 0.0, 0.0)
        for name, scales in CACHES:
            stored = kv_format(model.config, static[name], name, scales)
            losses, more = scores(model, piece, states(model, piece, stored), of_exact)
            got = float(losses.mean())
            rise, error = expected_rise(exact, more)
            yield NatsRow(
                *(case, str(stored), round(got, 5), round(got / exact - 1, 6)),
                expected_rise=round(rise, 6),
                standard_error=round(error, 6),
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint with a tokenizer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 8000], help="of each text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default: the file's")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args = parser.parse_args()
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    report = Report.for_device(torch.device(args.device))
    dtype = dtypes.get(args.dtype)
    for row in measure(args.folder, args.tokens, torch.device(args.device), dtype):
        line = f"{row.case:<48}{row.impl:<44}{row.nats:>9.5f}{row.rise:>+9.3%}"
        print(f"{line}{row.expected_rise:>+9.3%} ± {row.standard_error:.3%}", flush=True)
        report.rows.append(row)
        if args.json is not None:
            report.write(args.json)


if __name__ == "__main__":
    main()
