"""The shapes of published models that benchmarks take."""

from __future__ import annotations

import pytest

from ostinato.bench.shapes import KV_SCALES, KV_SUFFIXES, SHAPES, is_16_bit_twin
from ostinato.models import family_of, read_config
from ostinato.models.required_kernels import model_kernels
from ostinato.ops.catalogue import CATALOGUE

# Weights of linear layers and embeddings, in billions, of the models' cards.
PUBLISHED = {
    "gemma-3-27b": 27.0,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "mistral-small-3.1": 23.6,
    "mixtral-8x7b": 46.7,
    "phi-4": 14.7,
    "qwen2.5-7b": 7.62,
    "qwen3-30b-a3b": 30.5,
    "qwen3-8b": 8.19,
}


def test_names_over_8_bits_have_a_twin_over_16() -> None:
    for name in ("ostinato_int8{}", "ostinato_fp8{}_lm_head_int8", "ostinato_p16{}"):
        twin = name.format("")
        for dtype in filter(None, KV_SUFFIXES.values()):
            for scales in KV_SCALES.values():
                assert is_16_bit_twin(name.format(dtype + scales), twin)
                assert not is_16_bit_twin(twin, name.format(dtype + scales))
                assert not is_16_bit_twin(name.format(dtype + scales), name.format(dtype))
        assert not is_16_bit_twin(twin, twin)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_as_many_weights_as_published(name: str) -> None:
    config = read_config(SHAPES[name])
    layout = family_of(config).layout(config)
    modules = {m.name: m for part in layout.linears() for m in part.modules}
    modules |= {m.name: m for part in layout.experts() for m in part.stored()}
    weights = sum(module.rows * module.columns for module in modules.values())
    weights += config.vocab_size * config.hidden_size
    assert weights / 1e9 == pytest.approx(PUBLISHED.get(name, weights / 1e9), rel=5e-3)
    assert name.startswith("tiny") or name in PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_kernels_of_ours(name: str) -> None:
    assert set(model_kernels(read_config(SHAPES[name]))) <= set(CATALOGUE)
