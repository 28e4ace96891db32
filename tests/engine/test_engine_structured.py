"""Texts that follow a grammar, the grammars of strangers, and who runs beside them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine import Engine, FinishReason, SamplingParams, StructuredOutput
from ostinato.engine.detokenizer import Detokenizer
from ostinato.engine.structured import grammar as grammar_module
from ostinato.engine.structured.grammar import GrammarCompiler, Matcher
from tiny import byte_tokenizer, tiny_llama

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """Return one for all tests: its process takes seconds to start."""
    made = GrammarCompiler(TOKENIZER, 257, [256])
    yield made
    made.close()


def make_engine(
    compiler: GrammarCompiler | None, device: torch.device | str = "cpu", **options: Any
) -> Engine:
    defaults: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_chunk": 8}
    options = {"logits_processing": compiler is not None, **defaults, **options}
    engine = Engine(tiny_llama(device), TOKENIZER, **options)
    engine.grammars = compiler
    engine.capture(progress=False)
    return engine


def params(structured: StructuredOutput, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "structured": structured, **more})


def run_to_the_end(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}, "c": {"const": "x"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
FORMS = [
    (StructuredOutput(regex="[0-9]{3}-(yes|no)"), r"\d{3}-(yes|no)"),
    (StructuredOutput(choice=("left", "right", '"é😀"\n')), 'left|right|"é😀"\n'),
    (StructuredOutput(grammar='root ::= "<" [a-c]{2,4} ">"'), "<[a-c]{2,4}>"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_have_their_form(
    temperature: float, compiler: GrammarCompiler, device: torch.device
) -> None:
    engine = make_engine(compiler, device)
    asked = [params(form, temperature=temperature, seed=4) for form, _ in FORMS]
    for completion, (_, pattern) in zip(engine.generate(["abc"] * 3, asked), FORMS, strict=True):
        assert re.fullmatch(pattern, completion.text), completion.text
        assert completion.finish_reason is FinishReason.STOP
        assert completion.token_ids[-1] == 256


def test_schemas_give_json(compiler: GrammarCompiler, device: torch.device) -> None:
    engine = make_engine(compiler, device)
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        # Without a bias the random model would go on with white space.
        blank = dict.fromkeys((TOKENIZER.encode(" \n\t\r").ids), -100.0)
        asked = params(StructuredOutput(json_schema=schema), logit_bias=blank)
        (completion,) = engine.generate(["abc"], asked)
        value = json.loads(completion.text)
        assert value["a"] in (1, 22)
        assert isinstance(value["b"], bool)
        assert value["c"] == "x"


def test_a_json_object_begins_with_a_brace(compiler: GrammarCompiler) -> None:
    engine = make_engine(compiler)
    asked = params(StructuredOutput(json_object=True), max_tokens=3)
    (completion,) = engine.generate(["abc"], asked)
    assert completion.text.startswith("{")


def test_a_json_object_may_hold_anything(compiler: GrammarCompiler) -> None:
    matcher = Matcher(compiler.compile(StructuredOutput(json_object=True)))
    text = '{"x": [1, {"y": null}], "é": "z", "deep": {"a": [[], {}, -1.5e3]}}'
    for token in TOKENIZER.encode(text).ids:
        assert matcher.accept(token)
    assert matcher.accept(256)


def test_a_token_that_the_tokenizer_refuses_is_read_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar has not gone on then."""
    engine = make_engine(compiler)
    push, failures = Detokenizer.push, [True]

    def fails_once(self: Detokenizer, token: int, **how: Any) -> str:
        if failures:
            failures.clear()
            raise MemoryError
        return push(self, token, **how)

    monkeypatch.setattr(Detokenizer, "push", fails_once)
    request = engine.submit("abc", params(StructuredOutput(regex="[0-9]{3}")))
    with pytest.raises(MemoryError):
        run_to_the_end(engine)
    run_to_the_end(engine)
    assert re.fullmatch(r"\d{3}", engine.result(request).text)


def test_neighbours_and_preemption_change_no_text(
    compiler: GrammarCompiler, device: torch.device
) -> None:
    forms = [form for form, _ in FORMS]
    plain = SamplingParams(max_tokens=20, temperature=1.0, seed=8, repetition_penalty=1.2)
    asked = [params(form, temperature=1.0, seed=3, logprobs=1) for form in forms]
    mixed = [asked[0], plain, asked[1], asked[2], plain, asked[0]]
    prompts = [f"a prompt, {i}" for i in range(6)]
    tight = make_engine(compiler, device, max_context=40, num_pages=16)
    together = tight.generate(prompts, mixed)
    assert tight.stats.preemptions > 0
    alone, without = make_engine(compiler, device), make_engine(None, device)
    for prompt, one, completion in zip(prompts, mixed, together, strict=True):
        engine = without if one is plain else alone
        (expected,) = engine.generate([prompt], one)
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text
        assert completion.logprobs == expected.logprobs


@pytest.fixture(scope="module")
def lacking() -> Iterator[GrammarCompiler]:
    """Return a compiler whose tokenizer has no token for the letter z."""
    other = byte_tokenizer()
    other.add_special_tokens([TOKENIZER.id_to_token(TOKENIZER.encode("z").ids[0])])
    made = GrammarCompiler(other, 257, [256])
    yield made
    made.close()


def test_a_grammar_without_a_next_token_ends_in_an_error(
    compiler: GrammarCompiler, lacking: GrammarCompiler
) -> None:
    engine = make_engine(compiler)
    engine.grammars = lacking
    asked = [params(StructuredOutput(regex="az")), SamplingParams(max_tokens=4)]
    first, second = engine.generate(["abc", "abc"], asked)
    assert first.finish_reason is FinishReason.ERROR
    assert first.text == "a"
    assert engine.stats.failed_requests == 1
    engine.submit("abc", asked[0])
    events = []
    while not engine.idle:
        events += engine.step()
    assert events[-1].error == "structured: got a grammar that no token can follow from here"
    (expected,) = engine.generate(["abc"], SamplingParams(max_tokens=4))
    assert second.token_ids == expected.token_ids


def test_a_grammar_that_no_token_begins_is_refused(lacking: GrammarCompiler) -> None:
    for form in (StructuredOutput(regex="z+"), StructuredOutput(grammar='root ::= "z"')):
        with pytest.raises(ValueError, match=f"{form.kind}: got a text that no token begins"):
            lacking.compile(form)
    assert Matcher(lacking.compile(StructuredOutput(regex="z?"))).accept(256)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutput(regex="(a|b"), "regex: got a text that is no grammar: Regex parsing"),
        (StructuredOutput(grammar="root ::= other"), "grammar: got a text that is no grammar"),
        (StructuredOutput(json_schema={"type": 5}), "json_schema: got a text that is no grammar"),
        (StructuredOutput(regex="(" * 4000 + "a" + ")" * 4000), "regex: got a text"),
    ],
    ids=["regex", "grammar", "schema", "deep"],
)
def test_what_is_no_grammar_is_named(
    form: StructuredOutput, message: str, compiler: GrammarCompiler
) -> None:
    engine = make_engine(compiler)
    with pytest.raises(ValueError, match=message) as error:
        engine.submit("abc", params(form))
    assert "/" not in str(error.value).partition("grammar:")[2]
    assert engine.idle


def test_a_grammar_that_explodes_harms_nobody(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is killed, and the next one compiles another."""
    monkeypatch.setattr(compiler, "_seconds", 0.5)
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(6):
        both = {"type": "object", "properties": {"a": nested, "b": nested}}
        nested = {"anyOf": [both, {"type": "array", "items": nested}]}
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"json_schema: .* takes longer than 0.5 s to compile"):
        compiler.compile(StructuredOutput(json_schema=nested))
    assert time.monotonic() - started < 60
    monkeypatch.setattr(compiler, "_seconds", 10.0)
    compiler.compile(StructuredOutput(regex="after it"))


def test_a_grammar_that_runs_long_ends_its_text_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_SECONDS", 0.02)
    engine = make_engine(compiler, max_context=128)
    slow = params(StructuredOutput(regex="(((a*)*)*)*b"), max_tokens=100, logit_bias={
        TOKENIZER.encode("a").ids[0]: 100.0
    })  # fmt: skip
    plain = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = engine.generate(["abc", "abc"], [slow, plain])
    assert first.finish_reason is FinishReason.ERROR
    assert first.text == "a" * len(first.token_ids)
    assert second.finish_reason is FinishReason.LENGTH


def test_a_grammar_is_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler.compile(StructuredOutput(regex="once"))
    monkeypatch.setattr(compiler, "_compiled", None)  # no call of it
    assert compiler.compile(StructuredOutput(regex="once")) is first
    masks = torch.zeros(1, 9, dtype=torch.int32)
    matcher = Matcher(first)
    matcher.fill(masks, 0)
    allowed = [i for i in range(257) if int(masks[0, i // 32]) >> i % 32 & 1]
    assert TOKENIZER.encode("o").ids[0] in allowed
    assert all("once".startswith(TOKENIZER.decode([token])) for token in allowed)


def test_only_an_engine_with_graphs_for_it_takes_a_form() -> None:
    engine = make_engine(None)
    with pytest.raises(ValueError, match=r"structured: got Structured.*logits_processing=True"):
        engine.submit("abc", params(StructuredOutput(regex="a")))


def test_a_model_without_an_end_takes_no_form() -> None:
    endless = GrammarCompiler(TOKENIZER, 257, [])
    with pytest.raises(ValueError, match="structured: got a form, expected None: the model has no"):
        endless.compile(StructuredOutput(regex="a"))


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({}, ValueError, "structured: got nothing, expected one of"),
        ({"regex": "a", "json_object": True}, ValueError, r"structured: got \['json_object', 'r"),
        ({"json_object": 1}, TypeError, "json_object: got 1, expected bool"),
        ({"json_schema": 5}, TypeError, "json_schema: got int, expected a text or a mapping"),
        ({"json_schema": "{"}, ValueError, "json_schema: got no JSON"),
        ({"json_schema": "[" * 5000}, ValueError, "json_schema: got no JSON"),
        ({"json_schema": "[]"}, ValueError, r"json_schema: got \[\], expected an object"),
        ({"json_schema": {"a": object()}}, ValueError, "json_schema: got no JSON"),
        ({"json_schema": {"const": "x" * 70000}}, ValueError, "json_schema: got 70013 characters"),
        ({"regex": ""}, ValueError, "regex: got 0 characters, expected 1 to 8192"),
        ({"regex": b"a"}, TypeError, "regex: got bytes, expected str"),
        ({"regex": "a" * 9000}, ValueError, "regex: got 9000 characters, expected 1 to 8192"),
        ({"regex": "\ud800"}, ValueError, r"regex: got a text with '\\ud800', expected valid"),
        ({"choice": "ab"}, TypeError, "choice: got str, expected a sequence of str"),
        ({"choice": ()}, ValueError, "choice: got 0 texts, expected 1 to 4096"),
        ({"choice": ("a", 5)}, TypeError, "choice: got int, expected str"),
        ({"choice": ("a" * 40000, "b" * 40000)}, ValueError, "choice: got 80000 characters"),
        ({"grammar": 'root ::= "a"' + " " * 70000}, ValueError, "grammar: got 70012 characters"),
    ],
)
def test_bad_forms_are_named(fields: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        StructuredOutput(**fields)


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"not": {"type": "string"}}, "'not'"),
        ({"type": "integer", "if": {"const": 1}}, "'if'"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"$ref": "http://localhost/x.json"}, "a '$ref' to another document, 'http://localhost/"),
        ({"allOf": [{"type": "integer"}, {"maximum": 4}]}, "'allOf' of 2 schemas"),
        ({"maximum": 4}, "'maximum' without a 'type'"),
        ({"anyOf": [{"type": "integer"}], "maximum": 4}, "'maximum' beside 'anyOf'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minLength": 1}, "'minLength' beside '$ref'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keywords_that_are_not_enforced_are_refused(schema: dict[str, Any], fault: str) -> None:
    inside: list[dict[str, Any]] = [
        schema,
        {"type": "object", "properties": {"a": schema}},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}},
        {"$ref": "#/$defs/a", "$defs": {"a": schema}},
    ]
    for each in inside:
        with pytest.raises(ValueError, match=re.escape(f"json_schema: got {fault}")) as error:
            StructuredOutput(json_schema=each)
        assert str(error.value).endswith(", which cannot be enforced")


def test_schemas_of_pydantic_are_taken() -> None:
    class Inner(pydantic.BaseModel):
        kind: Literal["a", "b"]
        size: int | None = pydantic.Field(None, ge=0, description="how many")

    class Outer(pydantic.BaseModel):
        inner: Inner = pydantic.Field(description="the first")
        others: list[Inner] = pydantic.Field(min_length=1)
        names: dict[str, float] = {}
        # Names of properties are no keywords.
        not_: str = pydantic.Field(alias="not", pattern="^a+$", max_length=3)

    StructuredOutput(json_schema=Outer.model_json_schema())


def test_forms_can_be_keys() -> None:
    one = StructuredOutput(json_schema={"a": [1]})
    assert one == StructuredOutput(json_schema='{"a":  [1]}')
    assert len({one, StructuredOutput(choice=["a"]), StructuredOutput(choice=("a",))}) == 2


def test_memory_of_grammars_is_beyond_that_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_WORKER_BYTES", 64 << 20)
    compiler = GrammarCompiler(TOKENIZER, 257, [256])
    try:
        assert Matcher(compiler.compile(StructuredOutput(regex="[0-9]"))).accept(
            TOKENIZER.encode("7").ids[0]
        )
    finally:
        compiler.close()


def test_a_process_that_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "worker.py"
    program.write_text("raise SystemExit")
    monkeypatch.setattr(grammar_module, "_WORKER", program)
    compiler = GrammarCompiler(TOKENIZER, 257, [256])
    with pytest.raises(ValueError, match="cannot be compiled: no process starts for it"):
        compiler.compile(StructuredOutput(regex="[0-9]"))
    compiler.close()


PANICS = """
import runpy, xgrammar

class PanicException(BaseException):
    pass

def compile_regex(self, text):
    raise PanicException("index out of bounds")

xgrammar.GrammarCompiler.compile_regex = compile_regex
runpy.run_path({worker!r}, run_name="__main__")
"""


def test_a_panic_of_the_library_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one written in Rust it is no Exception."""
    program = tmp_path / "worker.py"
    program.write_text(PANICS.format(worker=str(grammar_module._WORKER)))
    monkeypatch.setattr(grammar_module, "_WORKER", program)
    compiler = GrammarCompiler(TOKENIZER, 257, [256])
    try:
        compiler.compile(StructuredOutput(choice=["a"]))
        worker = compiler._worker
        with pytest.raises(ValueError, match="regex: got a text that is no grammar: index out of"):
            compiler.compile(StructuredOutput(regex="[0-9]"))
        compiler.compile(StructuredOutput(choice=["b"]))
        assert compiler._worker is worker
    finally:
        compiler.close()


# What the syntaxes are made of, so that some texts are right and most are nearly so.
REGEX_PARTS = ["(?:", "(?=", "(?P<", "[^", "{2,", "\\d", "\\u", "\\x{110000}", "\\uD800", "\\p{"]
EBNF_PARTS = ["root", " ::= ", "\n", '"a"', "[a-z]", "{2}", "(=", "TagDispatch(", "\\U00110000"]
WORDS = ["#", "#/$defs/a", "(", "\\d{3}", "date", "string", "object", "array", "integer", ""]
KEYS = [
    "type",
    "properties",
    "items",
    "enum",
    "const",
    "anyOf",
    "allOf",
    "$ref",
    "$defs",
    "pattern",
]
KEYS += [
    "required",
    "minimum",
    "maximum",
    "minLength",
    "maxItems",
    "format",
    "additionalProperties",
]
LEAVES = st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
SCHEMAS = st.recursive(
    LEAVES | st.integers() | st.sampled_from(WORDS),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.sampled_from(KEYS), some),
    max_leaves=8,
)


def _texts(parts: list[str], letters: str) -> st.SearchStrategy[str]:
    some = st.sampled_from([*parts, *letters])
    return st.lists(some, min_size=1, max_size=10).map("".join)


def _of_schema(schema: dict[str, Any]) -> StructuredOutput | None:
    """Return the form; None where it is refused before it is compiled."""
    try:
        return StructuredOutput(json_schema=schema)
    except ValueError as error:
        if "which cannot be enforced" not in str(error):
            raise
        return None


@given(
    st.builds(StructuredOutput, regex=_texts(REGEX_PARTS, "ab^$.|*+?(){}[]-,\\<>:\0é😀"))
    | st.builds(
        StructuredOutput,
        grammar=_texts(EBNF_PARTS, 'ab|*+?()[]",\\#\0é').map(lambda text: f"root ::= {text}"),
    )
    | st.dictionaries(st.sampled_from(KEYS), SCHEMAS, max_size=4)
    .map(_of_schema)
    .filter(lambda form: form is not None)
)
def test_any_form_is_compiled_or_refused_by_name(
    compiler: GrammarCompiler, form: StructuredOutput
) -> None:
    matcher, error = _matcher(compiler, form)
    if matcher is None:
        assert error.startswith(f"{form.kind}: got a text ")
        return
    masks = torch.zeros(1, 9, dtype=torch.int32)
    matcher.fill(masks, 0)
    allowed = [i for i in range(257) if int(masks[0, i // 32]) >> i % 32 & 1]
    assert allowed
    assert matcher.accept(allowed[0]) or matcher.overdue


def _matcher(compiler: GrammarCompiler, form: StructuredOutput) -> tuple[Matcher | None, str]:
    try:
        return Matcher(compiler.compile(form)), ""
    except ValueError as error:
        return None, str(error)
