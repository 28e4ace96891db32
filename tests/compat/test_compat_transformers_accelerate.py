"""`accelerate`: one call that replaces what it can, and says what it left."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import MODELS, random_model, save
from quantized_files import FORMATS, write_quantized
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from effort import effort
from ostinato import ops
from ostinato.compat.transformers import (
    NAME,
    QuantizedLinear,
    RaggedStaticCache,
    Report,
    accelerate,
    replace_attention,
    replace_batching,
    replace_linears,
)
from ostinato.compat.transformers import batching as module_of_batching

transformers.logging.set_verbosity_error()

IDS = torch.tensor([[3, 41, 17, 8, 60]])
PROMPTS = [[3, 41, 17, 8, 60], [1, 2, 3], [9] * 21]
GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
PROJECTIONS = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def load(folder: Path, **options: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval()


def write(folder: Path, name: str = "llama") -> None:
    write_quantized(folder, random_model(MODELS[name]), FORMATS["ct-int8-dynamic"], margins={})


def generated(model: Any, prompt: list[int], **options: Any) -> list[int]:
    out = model.generate(torch.tensor([prompt]), **GREEDY, **options)
    return out[0, len(prompt) :].tolist()


def batched(model: Any) -> list[list[int]]:
    config = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1)
    # Without these it takes most of the machine's memory.
    sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
    results = model.generate_batch(
        PROMPTS, generation_config=config, continuous_batching_config=sizes, progress_bar=False
    )
    assert all(result.error is None for result in results.values())
    return [result.generated_tokens for result in results.values()]


def test_a_report_says_what_was_done(tmp_path: Path) -> None:
    write(tmp_path)
    model = load(tmp_path)
    report = accelerate(model)
    assert report.attention == model.config._attn_implementation == NAME
    assert report.batching
    names = [f"model.layers.{i}.{projection}" for i in range(2) for projection in PROJECTIONS]
    assert list(report.linears) == names
    assert all(isinstance(model.get_submodule(name), QuantizedLinear) for name in names)
    assert len(report.norms) == 5
    assert report.attention_layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert report.left == {"lm_head": "the checkpoint has no 8-bit weight of it"}
    assert str(report).splitlines() == [
        "attention: ostinato",
        "generate_batch: ostinato",
        "8-bit linear modules: 14 (model.layers.0.self_attn.q_proj, "
        "model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj and 11 more)",
        "RMS norms: 5 (model.layers.0.input_layernorm, "
        "model.layers.0.post_attention_layernorm, model.layers.1.input_layernorm and 2 more)",
        "RoPE and append in one kernel: 2 (model.layers.0.self_attn, model.layers.1.self_attn)",
        "left: 1 (lm_head): the checkpoint has no 8-bit weight of it",
    ]
    again = accelerate(model)
    assert (again.linears, again.norms, again.attention_layers) == ((), (), ())


def test_what_computes_something_else_is_left_and_said() -> None:
    report = accelerate(random_model(MODELS["gemma2"]))
    assert isinstance(report, Report)
    assert report.norms == report.linears == report.attention_layers == ()
    assert report.left["model.norm"] == "Gemma2RMSNorm computes something else than ops.rms_norm"
    assert report.left["model.layers.0.self_attn"].startswith("Gemma2Attention does something")
    assert report.left["model.layers.0.mlp.up_proj"] == "the checkpoint has no 8-bit weight of it"


def test_another_quantization_is_left_and_said(tmp_path: Path) -> None:
    plain = random_model(MODELS["llama"])
    config = {**plain.config.to_dict(), "quantization_config": {"quant_method": "awq"}}
    save(tmp_path, config, {})
    report = accelerate(plain, tmp_path)
    assert report.linears == ()
    assert "quant_method: got 'awq'" in report.left["linear modules"]
    assert len(report.norms) == 5


def test_only_models_of_transformers_are_taken() -> None:
    for function in (accelerate, replace_batching):
        with pytest.raises(TypeError, match="model: got Linear, expected a model of transformers"):
            function(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", effort(["qwen3"], ["llama", "qwen3", "mistral-window"]))
def test_an_accelerated_model_generates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever cache and batching, the tokens are those of the same model called by itself."""
    write(tmp_path, name)
    model = load(tmp_path)
    expected = []
    with torch.no_grad():
        replace_linears(model)  # the rest as transformers has it, with eager attention
        model.set_attn_implementation("eager")
        for prompt in PROMPTS:
            tokens = list(prompt)
            for _ in range(8):
                logits = model(torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    accelerate(model)
    calls: dict[str, int] = {}
    for op in ("paged_attention", "varlen_attention"):
        original = getattr(ops, op)

        def counted(*given: Any, _op: str = op, _call: Any = original, **options: Any) -> Any:
            calls[_op] = calls.get(_op, 0) + 1
            return _call(*given, **options)

        monkeypatch.setattr(ops, op, counted)
    assert [generated(model, prompt) for prompt in PROMPTS] == expected
    static = [generated(model, prompt, cache_implementation="static") for prompt in PROMPTS]
    assert static == expected
    assert calls.keys() == {"paged_attention"}
    assert batched(model) == expected
    assert calls["varlen_attention"] >= 8 * 2
    # The model is as it was, for generate and for another batch.
    assert model.config._attn_implementation == NAME
    assert batched(model) == expected


def test_a_refused_manager_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    model = load(tmp_path)
    accelerate(model)
    with pytest.raises(TypeError):
        model.init_continuous_batching(generation_config=None, unknown=1)
    assert model.config._attn_implementation == NAME


def test_batches_of_another_attention_are_as_they_were(tmp_path: Path) -> None:
    write(tmp_path)
    model = load(tmp_path)
    accelerate(model)
    model.set_attn_implementation("paged|eager")
    manager = model.init_continuous_batching(GenerationConfig(eos_token_id=-1))
    assert manager._original_attn_impl is None
    assert model.config._attn_implementation == "paged|eager"


def test_a_version_without_these_functions_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of_batching, "_their_functions", None)
    write(tmp_path)
    report = accelerate(load(tmp_path))
    assert not report.batching
    assert report.left["generate_batch"].startswith(f"transformers {transformers.__version__} ")


@pytest.mark.parametrize("kind", ["gpt2", "gpt_oss"])
def test_models_that_cannot_batch_with_ours_are_left(kind: str) -> None:
    """One would be switched to other kernels, and one fails at its first request in fp32."""
    sizes: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, **sizes),
        "gpt_oss": lambda: transformers.GptOssConfig(
            num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1, **sizes,
        ),
    }[kind]()  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    report = accelerate(model)
    assert not report.batching
    assert "generate_batch" in report.left


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("t5", "attention_mask: got padding where each query sees every key"),
        ("bert", "attention_mask: got padding where each query sees every key"),
        ("llama4_text", "mask_function: got "),
        ("deepseek_v32", "indices: got a tensor"),
    ],
)
def test_models_that_fail_with_our_attention_keep_their_own(kind: str, why: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 2}
    model: Any = {
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0,
                **sizes,
            )
        ),
        "llama4_text": lambda: transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(
                "llama4_text", num_local_experts=2, num_key_value_heads=2, head_dim=16,
                intermediate_size_mlp=64, bos_token_id=1, **SMALL, **sizes,
            )
        ),
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL, **sizes)),
        "deepseek_v32": lambda: transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(
                "deepseek_v32", num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16,
                qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=2,
                num_experts_per_tok=1, moe_intermediate_size=32, n_group=1, topk_group=1,
                index_topk=2, index_n_heads=2, index_head_dim=16, first_k_dense_replace=1,
                bos_token_id=1, **SMALL, **sizes,
            )
        ),
    }[kind]()  # fmt: skip
    next(module for module in model.modules() if module is not model).train()
    modes = [module.training for module in model.modules()]
    own = model.config._attn_implementation
    report = accelerate(model)
    assert report.attention == own == model.config._attn_implementation
    assert report.left["attention"].startswith(f"with ours its forward raises: {why}")
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        model.eval()(**model.dummy_inputs)


def test_a_model_that_can_not_be_tried_keeps_its_own(tmp_path: Path) -> None:
    write(tmp_path)
    model = load(tmp_path)
    model.model.layers[0].register_forward_pre_hook(lambda *_: 1 // 0)
    report = accelerate(model)
    assert report.attention != "ostinato"
    assert report.left["attention"].startswith("it could not be tried, since a forward of dummy_in")


def test_parts_of_a_model_get_their_own_attention_back() -> None:
    text = {"num_local_experts": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    text |= {"intermediate_size_mlp": 64, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 64}
    config = transformers.Llama4Config(
        text_config={**SMALL, **text},
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    )
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    own = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    model.set_attn_implementation(own)
    report = accelerate(model)
    assert "attention" in report.left
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_a_plain_model_needs_no_checkpoint(tmp_path: Path) -> None:
    model = random_model(MODELS["llama"])
    model.name_or_path = str(tmp_path)
    assert accelerate(model).attention == "ostinato"


def test_managers_wait_for_their_buffers_and_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        def _create_batch_processor(self) -> list[str]:
            done.append("filled")
            return done

    class Stream:
        def synchronize(self) -> None:
            done.append("waited")

    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    manager = Manager()
    module_of_batching._order_streams(manager, torch.device("cuda"))
    assert manager._create_batch_processor() is done
    assert done == ["filled", "waited"]
    alive = weakref.ref(manager)
    del manager
    assert alive() is None


def test_copies_batch_for_themselves(tmp_path: Path) -> None:
    write(tmp_path)
    model = load(tmp_path)
    accelerate(model)
    expected = batched(model)
    copied = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    assert batched(copied) == expected
    assert copied.config._attn_implementation == NAME


def test_attention_layers_may_be_replaced_after_linears(tmp_path: Path) -> None:
    write(tmp_path)
    model, plain = load(tmp_path, attn_implementation=NAME), load(tmp_path)
    assert len(replace_linears(model)) == 14
    assert len(replace_attention(model)) == 2
    accelerate(plain)
    logits = []
    with torch.no_grad():
        for each in (model, plain):
            cache = RaggedStaticCache(each, max_batch=1, max_length=16)
            rows = cache.rows(torch.tensor([5], dtype=torch.int32), tokens=5)
            logits.append(each(IDS, past_key_values=rows, position_ids=rows.position_ids).logits)
            assert cache.storage.any()
    torch.testing.assert_close(*logits, rtol=0.0, atol=1e-5)
