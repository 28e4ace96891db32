"""RMS norms of models of transformers by our op: which are replaced, and what they compute."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from compat_sizes import TWO_LAYERS as SIZES
from torch.nn import functional
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from effort import sampled
from ostinato import ops
from ostinato.compat.transformers import replace_norms
from ostinato.graphs import BufferSpec, GraphRunner, StaticBuffers
from ostinato.jit.errors import MissingKernelError
from ostinato.ops import reference

transformers.logging.set_verbosity_error()

BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def norm_names(*of_layer: str) -> list[str]:
    """Return the names of the norms of a model of two layers, in order."""
    return [f"model.layers.{i}.{name}" for i in range(2) for name in of_layer] + ["model.norm"]


def llama() -> Any:
    """Return a Llama whose norms' weights matter."""
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def norm_of(k: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return Llama's norm of random weights, replaced."""
    norm: Any = LlamaRMSNorm(k, eps=1e-5).requires_grad_(False)
    norm.weight.normal_()
    norm.to(device, dtype)
    assert replace_norms(norm) == [""]
    return norm


def by_the_op(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what the op gives for x [M, K] and a norm's weight."""
    return ops.rms_norm(x, norm.weight, norm.variance_epsilon)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (LlamaForCausalLM(LlamaConfig(**SIZES)), norm_names(*BLOCK_NORMS)),
        (
            Qwen3ForCausalLM(Qwen3Config(**SIZES)),
            norm_names("self_attn.q_norm", "self_attn.k_norm", *BLOCK_NORMS),
        ),
        # Its fresh weights are zeros, by which ours would give zeros, too.
        (GemmaForCausalLM(GemmaConfig(**SIZES)), []),
        (torch.nn.Sequential(torch.nn.RMSNorm(16, eps=1e-6)), ["0"]),
        (torch.nn.Sequential(torch.nn.RMSNorm(16)), []),  # its eps is left to x's dtype
        (torch.nn.Sequential(torch.nn.RMSNorm((2, 16), eps=1e-6)), []),
        (torch.nn.Sequential(torch.nn.RMSNorm(16, 1e-6, elementwise_affine=False)), []),
        (torch.nn.Sequential(torch.nn.LayerNorm(16)), []),
    ],
    ids=["llama", "qwen3", "gemma", "torch", "no-eps", "two-dims", "no-weight", "layer-norm"],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_that_are_replaced(
    model: torch.nn.Module, names: list[str], dtype: torch.dtype
) -> None:
    model = copy.deepcopy(model).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_numbers = torch.get_rng_state()
    assert replace_norms(model) == names
    assert replace_norms(model) == []
    assert torch.equal(random_numbers, torch.get_rng_state())
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


class OddRMSNorm(LlamaRMSNorm):
    """A norm in name, that has done something else to x, or to the result."""

    def __init__(self, how: str) -> None:
        super().__init__(64)
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        if self.how == "centred":
            return super().forward(x - x.mean(-1, keepdim=True))
        if self.how == "other eps":
            return functional.rms_norm(x, x.shape[-1:], self.weight, 1e-5)
        if self.how == "other dim":
            return functional.normalize(x.float(), dim=1).to(x.dtype) * self.weight
        if self.how == "other dtype":
            return super().forward(x).double()
        if self.how == "tuple":
            return (super().forward(x),)
        if self.how == "raises":
            raise RuntimeError("not for such x")
        return super().forward(x)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * gate)


@pytest.mark.parametrize(
    "how", ["centred", "other eps", "other dim", "other dtype", "tuple", "raises"]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_in_name_only_are_left_alone(how: str, dtype: torch.dtype) -> None:
    assert replace_norms(OddRMSNorm(how).to(dtype)) == []


def test_other_norms_that_are_left_alone() -> None:
    assert replace_norms(OddRMSNorm("as Llama")) == [""]
    assert replace_norms(GatedRMSNorm(64)) == []
    assert replace_norms(LlamaRMSNorm(64).double()) == []
    assert replace_norms(LlamaRMSNorm(64).to("meta")) == []
    hooked: Any = LlamaRMSNorm(64)
    hooked.forward = lambda x: x + 1
    assert replace_norms(hooked) == []


def test_a_missing_kernel_does_not_leave_a_norm_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rms_norm(*arguments: object, **options: object) -> torch.Tensor:
        raise MissingKernelError("not compiled")

    monkeypatch.setattr(ops, "rms_norm", rms_norm)
    with pytest.raises(MissingKernelError, match="not compiled"):
        replace_norms(LlamaRMSNorm(64))


def test_trying_a_norm_runs_no_hooks() -> None:
    norm, calls = LlamaRMSNorm(64).requires_grad_(False), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    assert replace_norms(norm) == [""]
    assert not calls
    norm(torch.randn(2, 64))
    assert calls == [1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 4, 64), (0, 3, 64), (70, 64)], ids=str)
def test_a_replaced_norm_is_as_close_to_fp64_as_its_class(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    norm = norm_of(64, dtype, device)
    x = torch.randn(shape).to(device, dtype)
    ours, theirs = norm(x), LlamaRMSNorm.forward(norm, x)
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    assert torch.equal(ours.view(-1, 64), by_the_op(norm, x.reshape(-1, 64)))
    if not ours.numel():
        return
    exact = reference.rms_norm(x, norm.weight, 1e-5, dtype=torch.float64)
    slack = 4 * torch.finfo(torch.float32).eps * exact.abs().max()  # torch may round exactly
    error = (theirs.double() - exact).abs().max()
    assert (ours.double() - exact).abs().max() <= error + slack


def test_inputs_of_any_strides(device: torch.device) -> None:
    norm = norm_of(16, torch.float32, device)
    qkv = torch.randn(2, 3, 6, 32, device=device)
    for x in (
        qkv[:, :, 2:4, :16],
        qkv[..., ::2],
        qkv[..., :16].transpose(1, 2),
        qkv[:1, :1, :1, :1].expand(2, 3, 6, 16),
    ):
        out = norm(x)
        assert out.is_contiguous()
        assert torch.equal(out.view(-1, 16), by_the_op(norm, x.reshape(-1, 16).contiguous()))


def test_inputs_of_another_dtype_go_to_the_class() -> None:
    """As those of norms of q and k within autocast, which have the dtype of products."""
    norm = norm_of(64, torch.float32, torch.device("cpu"))
    x = torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_inputs_that_are_refused() -> None:
    norm = norm_of(64, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"weight: got shape \[64\], expected \[32\]"):
        norm(torch.randn(2, 32))
    with pytest.raises(TypeError, match=r"x: got dtype torch.float64, expected"):
        norm.double()(torch.randn(2, 64).double())
    with pytest.raises(TypeError, match=r"model: got str, expected a torch.nn.Module"):
        replace_norms("model")  # type: ignore[arg-type]


def test_weights_are_read_at_each_call(device: torch.device) -> None:
    norm = norm_of(64, torch.float32, device)
    x = torch.randn(2, 64, device=device)
    norm.weight.mul_(3)
    assert torch.equal(norm(x), by_the_op(norm, x))
    norm.load_state_dict({"weight": torch.randn(64, device=device)})
    assert torch.equal(norm(x), by_the_op(norm, x))
    norm.weight = torch.nn.Parameter(torch.randn(64, device=device), requires_grad=False)
    assert torch.equal(norm(x), by_the_op(norm, x))
    norm.to(torch.bfloat16)
    assert torch.equal(norm(x.bfloat16()), by_the_op(norm, x.bfloat16()))
    norm.variance_epsilon = 1.0
    assert torch.equal(norm(x.bfloat16()), by_the_op(norm, x.bfloat16()))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_norms_of_its_own(how: str) -> None:
    model = llama()
    assert replace_norms(model) == norm_names(*BLOCK_NORMS)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert replace_norms(other) == []
    x = torch.randn(2, 64)
    before = model.model.norm(x)
    other.model.norm.weight.zero_()
    assert not other.model.norm(x).any()
    assert torch.equal(model.model.norm(x), before)


def test_gradients_are_those_of_the_class() -> None:
    norm = norm_of(64, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 64)
    norm.weight.requires_grad_(True)
    for wanted in (x, x.clone().requires_grad_(True)):
        out = norm(wanted)
        assert torch.equal(out, LlamaRMSNorm.forward(norm, wanted))
        out.square().sum().backward()
    assert norm.weight.grad is not None
    assert wanted.grad is not None
    norm.weight.requires_grad_(False)
    assert norm(wanted).requires_grad
    with torch.no_grad():
        assert torch.equal(norm(wanted), by_the_op(norm, wanted))
    with torch.inference_mode():
        assert torch.equal(norm(wanted), by_the_op(norm, wanted))


def test_logits_are_as_close_to_fp32_as_with_torchs_norms(device: torch.device) -> None:
    model = llama().to(device, torch.bfloat16)
    ids = torch.randint(97, (2, 13), device=device)
    theirs = model(ids).logits.float()
    exact = copy.deepcopy(model).float()(ids).logits
    assert replace_norms(model) == norm_names(*BLOCK_NORMS)
    ours = model(ids).logits.float()
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert (theirs - exact).norm() < 0.1 * exact.norm()
    model.float()
    torch.testing.assert_close(model(ids).logits, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", sampled([True, False], 2))
def test_torch_compiles_it_in_one_graph(dynamic: bool) -> None:
    norm = norm_of(64, torch.float32, torch.device("cpu"))
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(2, rows, 64)
        assert torch.equal(compiled(x), norm(x))
    norm.weight.mul_(2)
    assert torch.equal(compiled(x), norm(x))
    model = llama()
    ids = torch.randint(97, (2, 13))
    replace_norms(model)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(whole(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_graphs_replay_what_a_replaced_norm_computes(device: torch.device) -> None:
    norm = norm_of(64, torch.bfloat16, device)

    def some(generator: torch.Generator, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16()

    specs = {"x": BufferSpec((3, 64), torch.bfloat16, 0, some)}
    buffers = StaticBuffers(specs, 8, device)
    with GraphRunner(lambda batch: norm(batch.x), buffers, memory={"norm": norm}) as runner:
        report = runner.capture([1, 8])
        assert {graph.verdict for graph in report.graphs} == {"bit-equal"}
        x = torch.randn(5, 3, 64).bfloat16()
        for factor in (1, 2):
            norm.weight.mul_(factor)  # in place, as new weights are loaded
            assert torch.equal(runner.run(5, {"x": x}), norm(x.to(device)))
