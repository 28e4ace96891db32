"""The server with a pretrained model, and the openai client: chats, templates, tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from real_models import MODELS, RealModel, grouped
from transformers import AutoTokenizer

from ostinato.server import Settings
from ostinato.server.loading import EngineOptions, ServedModel, load_service
from serving import Client, serving

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(3600),
    pytest.mark.parametrize("real", grouped(MODELS[:1]), ids=lambda m: m.name, indirect=True),
]

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# In the manner of the Hermes models: a template of its own for requests with tools.
TOOL_USE = (
    "<|im_start|>system\nAnswer with a call of one of these tools:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'as <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>\n'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = (
    r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{2,12}"\}\}\n</tool_call>'
)


@pytest.fixture(scope="module")
def served(real: RealModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Serve the checkpoint, with a second template for tools."""
    folder = tmp_path_factory.mktemp("served")
    for file in real.folder().iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (folder / file.name).symlink_to(file)
    plain = (real.folder() / "chat_template.jinja").read_text()
    config = json.loads((real.folder() / "tokenizer_config.json").read_text())
    named = {"default": plain, "tool_use": TOOL_USE}
    config["chat_template"] = [{"name": n, "template": text} for n, text in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with serving(_service(folder)) as client:
        yield client


def _service(folder: Path) -> Any:
    options = EngineOptions(
        device=torch.device("cpu"),
        max_batch=2,
        max_context=512,
        capture_sizes=[2],
        verify=False,
        progress=False,
    )
    return load_service(ServedModel(folder, ("smol",), tools="hermes"), options, Settings(port=0))


@pytest.fixture
def ai(served: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as it:
        yield it


def test_chat_names_paris_whole_and_as_a_stream(ai: openai.OpenAI) -> None:
    asked: Any = {"model": "smol", "messages": CHAT, "max_tokens": 24, "temperature": 0}
    whole = ai.chat.completions.create(**asked).choices[0].message.content
    assert whole is not None
    assert "Paris" in whole
    chunks = list(ai.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_prompt_is_that_of_transformers(served: Client, real: RealModel) -> None:
    answer = served.post("/tokenize", {"messages": [*CHAT], "add_generation_prompt": True})
    tokenizer = AutoTokenizer.from_pretrained(real.folder())
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert answer[0] == 200, answer
    assert answer[1]["tokens"] == tokenizer(text, add_special_tokens=False).input_ids


def test_tool_call_of_the_city_in_question(ai: openai.OpenAI) -> None:
    message = {"role": "user", "content": "What is the weather in Paris?"}
    asked: Any = {"model": "smol", "messages": [message], "tools": [TOOL], "temperature": 0}
    form = {"structured_outputs": {"regex": CALL}}
    answer = ai.chat.completions.create(**asked, max_tokens=60, extra_body=form)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Paris"},
    )
