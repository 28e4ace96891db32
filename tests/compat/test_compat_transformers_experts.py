"""Mixtures of experts of transformers in a captured step: why it fails, and what helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from compat_sizes import TWO_LAYERS as SIZES
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ostinato.compat.transformers import NAME, RaggedStaticCache
from ostinato.graphs import BatchView, BufferSpec, CaptureError, GraphRunner, StaticBuffers
from ostinato.graphs.failures import Diagnosis, Failure
from ostinato.graphs.inspect.diagnosis import diagnose
from ostinato.graphs.inspect.op_trace import OperatorWatch

transformers.logging.set_verbosity_error()

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "attn_implementation": NAME}
MODELS: dict[str, Any] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4)),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4)),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=32),
    ),
}
SPECS = {
    "tokens": BufferSpec((), torch.int64, 0),
    "seq_lens": BufferSpec(
        (), torch.int32, 0, lambda g, shape: torch.randint(1, 9, shape, generator=g)
    ),
}
# What torch says of operators that wait for the device, in a capture.
PINNED = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
    "pinned. Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
FORBIDDEN = {"aten._grouped_mm.default": PINNED, "aten.nonzero.default": NOT_PERMITTED}
# A CPU's one_hot, in the eager implementation, looks at its input; that of CUDA does not.
READS = {"aten._local_scalar_dense.default": NOT_PERMITTED}


class Capturing(TorchDispatchMode):
    """Refuses on the CPU what a capture on CUDA refuses: operators, and what is said of them."""

    def __init__(self, forbidden: Mapping[str, str]) -> None:
        super().__init__()
        self._forbidden = forbidden

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if str(func) in self._forbidden:
            raise RuntimeError(self._forbidden[str(func)])
        return func(*args, **(kwargs or {}))


def model_of(name: str, experts: str | None) -> Any:
    kind, config = MODELS[name]
    model = kind(config).eval().requires_grad_(False)
    if experts is not None:
        model.set_experts_implementation(experts)
    return model


def step_of(model: Any, cache: RaggedStaticCache) -> Callable[[BatchView], torch.Tensor]:
    """Return a decode step of a model, as docs/graphs/transformers.md has it."""

    def step(batch: BatchView) -> torch.Tensor:
        rows = cache.rows(batch.seq_lens)
        out = model(batch.tokens.unsqueeze(1), past_key_values=rows, position_ids=rows.position_ids)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    return step


def diagnosis_of(model: Any, forbidden: Mapping[str, str]) -> Diagnosis | None:
    """Return the diagnosis of a step's second capture, None where nothing is wrong with it."""
    step = step_of(model, RaggedStaticCache(model, max_batch=4, max_length=16))
    batch = StaticBuffers(SPECS, 4, "cpu").view(4)
    watch = OperatorWatch(lambda: True, lambda: True, "cpu")
    try:
        with Capturing(forbidden), watch:
            step(batch)
    except RuntimeError as error:
        return diagnose(error, Failure((), watch.finish(error)))
    return None


@pytest.mark.parametrize(
    ("experts", "operator"),
    [(None, "aten._grouped_mm.default"), ("eager", "aten.nonzero.default")],
    ids=["default", "eager"],
)
@pytest.mark.parametrize("name", MODELS)
def test_experts_that_cannot_be_captured_have_a_remedy(
    name: str, experts: str | None, operator: str
) -> None:
    diagnosis = diagnosis_of(model_of(name, experts), FORBIDDEN)
    assert diagnosis is not None
    assert diagnosis.operator == operator
    assert diagnosis.remedy is not None
    assert 'set_experts_implementation("batched_mm")' in diagnosis.remedy


@pytest.mark.parametrize("name", MODELS)
def test_the_remedy_reads_nothing_on_the_host(name: str) -> None:
    model = model_of(name, "batched_mm")
    assert diagnosis_of(model, FORBIDDEN | READS) is None
    ids = torch.randint(97, (2, 5))
    ours = model(ids).logits
    model.set_experts_implementation("eager")
    torch.testing.assert_close(ours, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_experts_are_captured_by_the_remedy_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    model = model_of(name, "eager").to(device, dtype)
    cache = RaggedStaticCache(model, max_batch=4, max_length=16)
    buffers = StaticBuffers(SPECS, 4, device)
    memory = {"model": model, "cache": cache.tensors()}
    with GraphRunner(step_of(model, cache), buffers, memory=memory) as runner:
        with pytest.raises(CaptureError, match=r'set_experts_implementation\("batched_mm"\)'):
            runner.capture([4], progress=False)
        model.set_experts_implementation("batched_mm")
        report = runner.capture([4], progress=False)
        assert report.graphs[0].verdict.startswith("bit-equal")
