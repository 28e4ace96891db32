"""Regular expressions of a stranger's configuration: those of `re`, within limits."""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from quantized_files import compressed_tensors

from ostinato.checkpoint import CheckpointError
from ostinato.checkpoint.formats import compressed_tensors as ct
from ostinato.checkpoint.formats import hf_fp8, modelopt
from ostinato.checkpoint.patterns import PatternMatcher
from ostinato.checkpoint.quantization import formats
from ostinato.checkpoint.section import Section

NAME = "model.layers.0.self_attn.q_proj"
SLOW = "(?:(?:.)+?)+?[!?]"  # for `regex`, and so is sec_01's for `re`

# Of llm-compressor recipes, model cards and vLLM's tests.
WRITTEN = [
    r".*lm_head",
    r".*self_attn.(q|k|v)_proj$",
    r"model\.layers\.(0|1|2)\.mlp\..*",
    r"^(?!.*lm_head).*proj$",
    r".*\.(?!(?:mlp|experts)).*",
    r"(?i:MODEL).*",
    r".*mlp.(gate|up|gate_up|down)_proj.*",
    r"model[.]layers[.]\d{1,3}[.].*(?<=q_proj)",
    r"vision_tower.*",
    r"",
]
NAMES = [NAME, "lm_head", "model.layers.11.mlp.down_proj", "a{b}c", ""]

_PIECES = ["a", "b", "m", ".", r"\.", "[a-z]", "[^a-z]", r"\d", r"\w", "_", "lm_head", "^", "$"]
_PIECES += [r"\b", "[[a]", "[a&&b]", "[a--b]", "[a||b]", "{", "}", "{e<=1}", "{s}", "{}", r"\{"]
_REPEATS = ["*", "+", "?", "*?", "{2}", "{0,3}", "{1,}", "{,2}", "{,}", "{e<=1}", "{i}"]


def _wider(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(st.just("(?:"), inner, st.just(")"), st.sampled_from(_REPEATS)).map("".join),
        st.tuples(st.just("(?:"), inner, st.just("|"), inner, st.just(")")).map("".join),
        st.tuples(st.sampled_from(["(?=", "(?!", "("]), inner, st.just(")")).map("".join),
    )


PATTERNS = st.recursive(st.sampled_from(_PIECES), _wider, max_leaves=6)


@pytest.mark.parametrize("pattern", WRITTEN)
def test_patterns_of_checkpoints_mean_what_re_means(pattern: str) -> None:
    matcher = PatternMatcher("file")
    for name in NAMES:
        assert matcher.matches(pattern, name) == (re.match(pattern, name) is not None), name


@given(PATTERNS, st.sampled_from(["", "ab", "lm_head", "a{e<=1}b", "a{}", "m.a_b"]))
def test_any_pattern_means_what_re_means(pattern: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            expected = re.match(pattern, name) is not None
        except re.error:
            assume(False)
        assert PatternMatcher("file").matches(pattern, name) == expected


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "pattern",
    [
        SLOW,
        r"((?:.)+?)*\1\1[!?]",
        "(?=(?:a|[a-z.])*(?:.|[a-z.])*x)",
        "(.)?" * 99 + r"\1" * 9,
    ],
)
def test_a_pattern_that_takes_too_long_is_named(pattern: str) -> None:
    words = "^" + re.escape(f"file: {pattern[:40]!r}"[:-1]) + ".* takes more than 1 s to match"
    with pytest.raises(CheckpointError, match=words):
        PatternMatcher("file").matches(pattern, NAME)


@pytest.mark.timeout(60)
def test_many_slow_patterns_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.checkpoint.patterns._TOTAL_SECONDS", 0.2)
    matcher = PatternMatcher("file")
    patterns = (f"(.*)(.*)(.*)(.*){number}?\\1\\2\\3\\4[!?]" for number in range(10**6))
    begin = time.thread_time()
    with pytest.raises(CheckpointError, match=r"file: its patterns take more than 0\.2 s"):
        any(matcher.matches(pattern, NAME) for pattern in patterns)
    assert time.thread_time() - begin < 5


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?:|.){2000000000}", "expected at most"),
        ("(?:(?:(?:a|.){99}){99}){99}", "expected at most"),
        ("a" * 200_000, "expected at most"),
        ("a{99999999999}", "expected at most"),
        ("(?:" * 20_000 + "a" + ")" * 20_000, "no regular expression"),
        ("(", "no regular expression"),
        (r"\p{L}", "no regular expression"),
    ],
    ids=lambda text: text[:12],
)
def test_a_pattern_that_takes_too_much_memory_is_named(pattern: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^file: '.*{words}") as caught:
        PatternMatcher("file").matches(pattern, "")
    assert len(str(caught.value)) < 500


def fields(format_name: str, entry: str) -> dict[str, Any]:
    """Return a configuration that ignores `entry`."""
    return {
        "compressed-tensors": compressed_tensors("int", "channel", "token", ignore=[f"re:{entry}"]),
        "fp8": {"activation_scheme": "static", "ignored_layers": [entry]},
        "modelopt": {"quant_algo": "FP8", "ignore": [entry]},
    }[format_name]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["compressed-tensors", "fp8"])
def test_no_format_hangs_on_a_strangers_pattern(name: str) -> None:
    parse = formats()[name].parse
    with pytest.raises(CheckpointError, match=r"config\.json.*takes more than 1 s"):
        parse(Section("config.json", fields(name, SLOW))).scheme_of(NAME)
    # sec_01: Python's `re` would take years.
    ours = parse(Section("config.json", fields(name, "(([a-z._0-9]+)+)+!")))
    assert str(ours.scheme_of(NAME))


@pytest.mark.timeout(60)
def test_targets_are_bounded_too() -> None:
    config = compressed_tensors("int", "channel", "token", ignore=[])
    config["config_groups"]["group_0"]["targets"] = [f"re:{SLOW}"]
    with pytest.raises(CheckpointError, match=r"config\.json.*takes more than 1 s"):
        ct.parse_compressed_tensors(Section("config.json", config)).scheme_of(NAME)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["compressed-tensors", "fp8", "modelopt"])
def test_every_format_matches_in_one_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def matches(_self: PatternMatcher, pattern: str, text: str) -> bool:
        asked.append(text)
        return False

    monkeypatch.setattr(PatternMatcher, "matches", matches)
    formats()[name].parse(Section("config.json", fields(name, "model.*"))).scheme_of(NAME)
    assert NAME in asked


@pytest.mark.timeout(60)
def test_a_wildcard_of_many_stars_is_fast() -> None:
    entry = "*a" * 4000 + "!"
    config = {"quant_algo": "FP8", "ignore": [entry]}
    assert modelopt.parse_modelopt(Section("config.json", config)).scheme_of(NAME)


@pytest.mark.timeout(60)
def test_a_million_plain_names_are_fast() -> None:
    config = compressed_tensors("int", "channel", "token")
    config["ignore"] = [f"model.layers.{index}" for index in range(1_000_000)]
    scheme_of = ct.parse_compressed_tensors(Section("config.json", config)).scheme_of
    begin = time.thread_time()
    for index in range(1000):
        scheme_of(f"model.layers.{index}.mlp.up_proj")
    assert time.thread_time() - begin < 1


def test_entries_of_fp8_are_whole_patterns() -> None:
    config = {"activation_scheme": "static", "ignored_layers": ["a|b{1,2}"]}
    scheme_of = hf_fp8.parse_hf_fp8(Section("config.json", config)).scheme_of
    assert str(scheme_of("bb.x")) == "not quantised"
    assert str(scheme_of("c")) != "not quantised"
