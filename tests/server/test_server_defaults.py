"""Sampling defaults: of generation_config.json, of OpenAI's API, and what a request overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.checkpoint.errors import CheckpointError
from ostinato.engine import SamplingParams
from ostinato.server.api.fields import SamplingFields, sampling_params
from ostinato.server.defaults import generation_defaults
from serving import make_service, serving


def _params(defaults: dict[str, Any], **fields: Any) -> SamplingParams:
    (params,) = sampling_params(SamplingFields(**fields), 5, defaults, 1)
    return params


def test_requests_override_the_checkpoint_and_that_openai() -> None:
    assert _params({}) == SamplingParams(max_tokens=5, temperature=1.0)
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert _params(own) == SamplingParams(max_tokens=5, **own)
    asked = _params(own, temperature=0, top_k=-1, repetition_penalty=1.1)
    expected = SamplingParams(5, temperature=0, top_p=0.9, top_k=0, repetition_penalty=1.1)
    assert asked == expected
    off = {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "min_tokens": 0}
    assert _params({}, **off) == _params({})


def test_generation_config_is_read_and_checked(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.7, "top_k": 50, "do_sample": True, "x": None}))
    assert generation_defaults(tmp_path) == {"temperature": 0.7, "top_k": 50}
    for fields in ({"temperature": "hot"}, {"top_p": 2}):
        file.write_text(json.dumps(fields))
        with pytest.raises(CheckpointError, match=r"generation_config\.json: (temp|top_p)"):
            generation_defaults(tmp_path)


def test_server_samples_with_its_defaults() -> None:
    with serving(make_service(defaults={"temperature": 0.0})) as client:
        fields = {"prompt": "abc", "max_tokens": 12, "ignore_eos": True}
        greedy = client.complete(**fields, temperature=0)["choices"]
        assert client.complete(**fields)["choices"] == greedy
        assert client.complete(**fields, temperature=1.5, seed=1)["choices"] != greedy
