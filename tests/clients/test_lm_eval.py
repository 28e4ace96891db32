"""lm-eval's local-completions: what it finds by HTTP is what the engine says itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.engine import Engine, SamplingParams
from server_process import KEY, TINY_LLAMA

pytestmark = pytest.mark.clients

QUESTIONS = [
    ("A list display is", [" a", " possibly", " Greek"], 1),
    ("If an exception occurs in the try", [" clause", " banana", " music"], 0),
    ("The import statement combines two", [" operations", " cities", " dogs"], 0),
    ("Classes provide a means of bundling", [" data", " water", " trees"], 0),
    ("A function definition introduces the function", [" name", " moon", " soup"], 0),
    ("The keyword def introduces a function", [" definition", " kitchen", " horse"], 0),
]
CHOICE_TASK = """\
task: python_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXT_TASK = """\
task: python_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine of the server's model."""
    model = load_model(TINY_LLAMA, device=torch.device("cpu"))
    engine = Engine(model, load_tokenizer(TINY_LLAMA), max_batch=4, logits_processing=True)
    engine.capture([4], progress=False, verify=False)
    return engine


@pytest.fixture(scope="module")
def samples(url: str, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Let lm-eval evaluate, and return its samples by the task's name."""
    folder = tmp_path_factory.mktemp("lm_eval")
    docs = folder / "questions.jsonl"
    lines = [json.dumps({"text": t, "choices": c, "answer": a}) for t, c, a in QUESTIONS]
    docs.write_text("\n".join(lines))
    (folder / "choice.yaml").write_text(CHOICE_TASK.format(file=docs))
    (folder / "text.yaml").write_text(TEXT_TASK.format(file=docs))
    model = f"model=tiny,base_url={url}/v1/completions,tokenizer={TINY_LLAMA},num_concurrent=4"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [
            *(str(programs / "lm_eval"), "--model", "local-completions", "--model_args", model),
            *("--tasks", "python_words,python_texts", "--include_path", str(folder)),
            *("--output_path", str(folder / "out"), "--log_samples"),
        ],
        env={**os.environ, **offline, "OPENAI_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        name: [
            json.loads(line) for file in folder.rglob(f"samples_{name}_*") for line in file.open()
        ]
        for name in ("python_words", "python_texts")
    }


def test_log_likelihoods_are_the_engines(samples: dict[str, Any], engine: Engine) -> None:
    words = samples["python_words"]
    assert len(words) == len(QUESTIONS)
    for sample in words:
        text, choices, _ = QUESTIONS[sample["doc_id"]]
        for choice, (told, greedy) in zip(choices, sample["filtered_resps"], strict=True):
            # Tokens of the prompt and of the choice are those of both together.
            prompt = engine.tokenizer.encode(text).ids
            whole = engine.tokenizer.encode(text + choice).ids
            params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
            (done,) = engine.generate([whole], params)
            assert done.prompt_logprobs is not None
            own = [each for each in done.prompt_logprobs[len(prompt) :] if each is not None]
            assert float(told) == pytest.approx(sum(each.logprob for each in own), abs=1e-4)
            best = all(each.logprob == each.top[0][1] for each in own)
            assert (greedy in (True, "True")) == best


def test_generated_texts_are_the_engines(samples: dict[str, Any], engine: Engine) -> None:
    texts = samples["python_texts"]
    assert len(texts) == len(QUESTIONS)
    params = SamplingParams(max_tokens=12, temperature=0, stop=["."])
    for sample in texts:
        (done,) = engine.generate([QUESTIONS[sample["doc_id"]][0]], params)
        assert sample["resps"] == [[done.text]]
