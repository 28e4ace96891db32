"""The recorded survey of architectures is today's: `python tests/models/survey.py` renews it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import survey
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ostinato.models.registry import families, towers

RECORDED: dict[str, Any] = json.loads(survey.RESULTS.read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = RECORDED["rows"]


def test_every_case_is_recorded_and_no_other() -> None:
    assert [row["case"] for row in ROWS] == list(survey.CASES)
    assert len(survey.SURVEYED) == len(set(survey.SURVEYED)) == 89
    assert RECORDED["counts"] == survey.summary(ROWS)


def test_every_family_and_tower_is_among_the_cases() -> None:
    compared = {config.model_type for config in survey.CONFIGS.values()}
    # Of text towers, which have no class of their own in transformers' list of generators.
    text = {config.get_text_config().model_type for config in survey.CONFIGS.values()}
    assert compared | text >= families().keys() | towers().keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_a_recorded_verdict_is_todays(row: dict[str, Any]) -> None:
    name = row["case"]
    config = survey.CONFIGS[name] if row["loads"] else CONFIG_MAPPING[name]()
    refused = survey.refusal(config.to_dict())
    assert refused == row.get("refused")


def test_what_loads_was_compared_and_found_equal() -> None:
    for row in ROWS:
        if row["loads"]:
            errors = [row[key] for key in ("max_error", "max_error_int8", "max_error_fp8")]
            assert max(errors) <= survey.LIMIT, row
            assert row["greedy_texts_equal"], row


def test_the_page_has_the_recorded_tables() -> None:
    text = survey.PAGE.read_text(encoding="utf-8")
    assert text == survey.page(text, ROWS)
