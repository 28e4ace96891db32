"""Incremental text: whole characters, nothing of a stop string, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ostinato.engine.detokenizer import Detokenizer
from tiny import byte_fallback_tokenizer, byte_tokenizer

TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def run(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = Detokenizer(TOKENIZER, encode("A prompt"), stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces, stream.stopped


def cut(text: str, stop: tuple[str, ...]) -> str:
    """Cut before the stop string that is complete first, as letters come one by one."""
    for end in range(1, len(text) + 1):
        starts = [text.find(s, 0, end) for s in stop if s in text[:end]]
        if starts:
            return text[: min(starts)]
    return text


@given(st.text(alphabet="aé漢🙂 ", max_size=12))
def test_pieces_are_whole_characters(text: str) -> None:
    pieces, stopped = run(encode(text))
    assert "".join(pieces) == text
    assert not stopped
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_decode_to_what_the_tokenizer_makes_of_them(ids: list[int]) -> None:
    pieces, _ = run(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)


@example("aba", ["b", "aba"])
@given(
    st.text(alphabet="abc", max_size=16),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, stops: list[str]
) -> None:
    stop = tuple(stops)
    pieces, stopped = run(encode(text), stop)
    assert "".join(pieces) == cut(text, stop)
    assert stopped == any(s in text for s in stop)


def test_stop_strings_do_not_depend_on_token_borders() -> None:
    words = Tokenizer(models.WordLevel({"abcd": 0, "?": 1}, unk_token="?"))
    words.decoder = decoders.Fuse()
    stream = Detokenizer(words, [], ("abcd", "bc"))
    assert stream.push(0) == "a"
    assert stream.stopped


def test_a_stop_string_that_only_the_end_completes_counts() -> None:
    stream = Detokenizer(TOKENIZER, [], ("\N{REPLACEMENT CHARACTER}",))
    assert [stream.push(token) for token in [*encode("a"), *encode("é")[:1]]] == ["a", ""]
    assert stream.finish() == ""
    assert stream.stopped


FALLBACK = byte_fallback_tokenizer()


@given(st.lists(st.integers(1, 259), max_size=20))
def test_bytes_that_later_bytes_make_invalid_are_survived(ids: list[int]) -> None:
    stream = Detokenizer(FALLBACK, [1], ())
    pieces = [stream.push(token) for token in ids]
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)


PIECES = st.lists(st.sampled_from(["\u2581the", "\u2581cat", "s", "é", "漢", "𝄞"]), max_size=8)


def ids_of(pieces: list[str]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        known = FALLBACK.token_to_id(piece)
        ids += [known] if known is not None else [4 + byte for byte in piece.encode()]
    return ids


@given(prompt=PIECES, pieces=PIECES)
def test_valid_bytes_and_words_decode_exactly(prompt: list[str], pieces: list[str]) -> None:
    stream = Detokenizer(FALLBACK, [2, *ids_of(prompt)], ())
    shown = [stream.push(token) for token in ids_of(pieces)]
    assert "".join(shown) + stream.finish() == "".join(pieces).replace("\u2581", " ")


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("before", [[], [2], [1, 2]], ids=str)
def test_a_character_begun_in_the_prompt_is_shown(before: list[int], first: int) -> None:
    prompt, text = ids_of(["🙂"])[:first], [*ids_of(["🙂"])[first:], 3, 2, 1, 2]
    stream = Detokenizer(FALLBACK, [*before, *prompt], ())
    shown = [stream.push(token) for token in text]
    assert "".join(shown) + stream.finish() == "🙂s cat the cat"


def test_invisible_tokens_do_not_slow_the_next_ones() -> None:
    decoded = []

    class Counting:
        id_to_token = staticmethod(TOKENIZER.id_to_token)

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            decoded.append(len(ids))
            text: str = TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    stream = Detokenizer(Counting(), encode("a"), ())  # type: ignore[arg-type]
    for token in [256, 10_000] * 100:
        assert stream.push(token) == ""
    assert max(decoded) <= 2
    assert stream.push(*encode("b")) == "b"


STRAY = next(i for i in range(256) if TOKENIZER.decode([i]) == "\N{REPLACEMENT CHARACTER}")
GARBAGE = {
    "stray bytes": [STRAY],
    "U+FFFD itself": encode("\N{REPLACEMENT CHARACTER}"),
    "halves of characters": encode("漢")[:2],
    "a letter and a half": [*encode("a"), *encode("🙂")[:3]],
}


@pytest.mark.parametrize("ids", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("tokenizer", [TOKENIZER, FALLBACK], ids=["byte level", "byte fallback"])
def test_what_no_byte_can_complete_is_not_held_back(tokenizer: Tokenizer, ids: list[int]) -> None:
    decoded: list[int] = []

    class Counting:
        id_to_token = staticmethod(tokenizer.id_to_token)

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            decoded.append(len(ids))
            text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    if tokenizer is FALLBACK:
        ids = [4 + byte for byte in "".join(TOKENIZER.id_to_token(i) or "" for i in ids).encode()]
        ids = [4 + 0x80] if len(ids) < 2 else [4 + 0xE6, 4 + 0xBC]
    stream = Detokenizer(Counting(), [1], ())  # type: ignore[arg-type]
    silent = 0
    for number in range(200):
        silent = 0 if stream.push(ids[number % len(ids)]) else silent + 1
        assert silent <= 6
    assert max(decoded) <= 24
    if tokenizer is TOKENIZER:
        whole = tokenizer.decode([ids[number % len(ids)] for number in range(200)])
        stream.finish()
        assert stream.text == whole


@given(st.lists(st.sampled_from([*"aé漢🙂", "\N{REPLACEMENT CHARACTER}", STRAY]), max_size=40))
def test_characters_between_stray_bytes_are_exact(pieces: list[str | int]) -> None:
    ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else encode(piece))]
    shown, _ = run(ids)
    assert "".join(shown) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("last", [False, True])
def test_hidden_tokens_show_nothing(last: bool) -> None:
    """An end token that tokenizer.json does not call special, as some do."""
    a, end, half = (*encode("a"), *encode("b"), encode("é")[0])
    stream = Detokenizer(TOKENIZER, [end], ("ax",), hidden={end})
    assert [stream.push(token) for token in (end, a)] == ["", ""]
    assert stream.push(end, last=last) == ("a" if last else "")
    if not last:
        assert stream.push(half) == ""
        assert stream.push(end) == ""
        assert stream.push(encode("é")[1]) == "aé"


def test_a_possible_stop_string_is_held_back() -> None:
    stream = Detokenizer(TOKENIZER, [], ("END",))
    assert [stream.push(token) for token in encode("aENxEN")] == ["a", "", "", "ENx", "", ""]
    assert stream.finish() == "EN"


@pytest.mark.parametrize("prompt", ["", "é", "some longer prompt text"])
def test_special_tokens_show_nothing(prompt: str) -> None:
    stream = Detokenizer(TOKENIZER, encode(prompt), ())
    assert [stream.push(t) for t in [*encode("hi"), 256]] == ["h", "i", ""]
    assert stream.finish() == ""
