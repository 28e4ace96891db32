"""Chat templates: what they may do, what they may not, and where they are read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.checkpoint.errors import CheckpointError
from ostinato.server.chat.render import ChatTemplate, TemplateFault
from ostinato.server.chat.templates import load_chat_template
from serving import CHATML

MESSAGES = [{"role": "user", "content": "hi <b>"}]


@pytest.fixture
def rendering() -> Iterator[Any]:
    """Return a function that renders a template once, with little patience."""
    made: list[ChatTemplate] = []

    def render(source: str, seconds: float = 5.0, **variables: Any) -> str:
        made.append(ChatTemplate({"default": source}, {"bos_token": "<s>"}, seconds))
        return made[-1].render(MESSAGES, variables=variables)

    yield render
    for template in made:
        template.close()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (CHATML, "<|im_start|>user\nhi <b><|im_end|>\n<|im_start|>assistant\n"),
        ("{{ bos_token }}{{ messages | tojson }}", f"<s>{json.dumps(MESSAGES)}"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{{ strftime_now('%Y') }}", time.strftime("%Y")),
        ("{{ x }}", "é\ud800"),
    ],
)  # fmt: skip
def test_templates_render_as_in_transformers(rendering: Any, source: str, text: str) -> None:
    assert rendering(source, add_generation_prompt=True, x="é\ud800") == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user') }}",
        "{{ messages.x.y }}",
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set ns = messages.append(1) %}",
        "{% include '/etc/passwd' %}",
        "{% set x = 'a' * 10 ** 10 %}{{ x }}",
        "{{ 'a' | center(2000000000) }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    ],
)
def test_templates_that_misbehave_are_refused(rendering: Any, source: str) -> None:
    with pytest.raises(TemplateFault, match=r"^messages: the chat template"):
        rendering(source)


def test_template_that_loops_is_ended_and_forgotten() -> None:
    loop = "{% if messages[0].content == 'loop' %}" + "{% for i in range(99999) %}" * 4
    loop += "{% endfor %}" * 4 + "{% endif %}ok"
    template = ChatTemplate({"default": loop}, {}, 0.3)
    started = time.monotonic()
    with pytest.raises(TemplateFault, match=r"longer than 0\.3 s"):
        template.render([{"role": "user", "content": "loop"}])
    assert time.monotonic() - started < 40
    assert template.render(MESSAGES) == "ok"
    template.close()


def test_a_process_that_was_killed_is_started_again() -> None:
    template = ChatTemplate({"default": "ok"}, {}, 10.0)
    assert template.render(MESSAGES) == "ok"
    assert template._process is not None
    template._process.kill()
    template._process._process.wait()
    assert template.render(MESSAGES) == "ok"
    template.close()


def test_tool_template_is_for_tools() -> None:
    template = ChatTemplate({"default": "a", "tool_use": "b{{ tools | length }}"}, {}, 5.0)
    assert template.render(MESSAGES) == "a"
    assert template.render(MESSAGES, tools=[{}]) == "b1"
    template.close()


def test_templates_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, 5.0) is None

    def rendered(tools: list[Any] | None = None) -> str:
        template = load_chat_template(tmp_path, 5.0)
        assert template is not None
        text = template.render(MESSAGES, tools=tools)
        template.close()
        return text

    config: dict[str, Any] = {
        "bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}one"
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() == "<s>one"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    config["chat_template"] = named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert (rendered(), rendered(tools=[{}])) == ("d", "t")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert (rendered(), rendered(tools=[{}])) == ("file", "t")


@pytest.mark.parametrize("value", [5, [{"name": "x"}], [["a", "b"]], {"default": "x"}])
def test_malformed_templates_are_named(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template: got"):
        load_chat_template(tmp_path, 5.0)
