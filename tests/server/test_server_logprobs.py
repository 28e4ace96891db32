"""Texts and bytes of single tokens, as log-probabilities tell them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ostinato.engine import TokenLogprobs
from ostinato.server.logprobs import CompletionLogprobs, TokenTexts, chat_logprobs
from tiny import byte_fallback_tokenizer, byte_tokenizer

BYTES, FALLBACK = byte_tokenizer(), byte_fallback_tokenizer()
LOGPROBS = TokenLogprobs(-1.0, ())


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer is BYTES:
        ids: list[int] = tokenizer.encode(text).ids
        return ids
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte_level", "byte_fallback"])
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6))
def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = [(token, LOGPROBS) for token in _ids(tokenizer, text)]
    content = chat_logprobs(TokenTexts(tokenizer), tokens)["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == text


def test_each_byte_has_a_token() -> None:
    texts = TokenTexts(BYTES)
    assert sorted(texts.bytes_of(token) or b"" for token in range(256)) == [
        bytes([byte]) for byte in range(256)
    ]
    # As GPT-2 has them.
    letters = {"A": 0x41, "Ā": 0, "Ġ": 0x20, "ł": 0xA0, "Ń": 0xAD, "ÿ": 0xFF}
    for letter, byte in letters.items():
        assert texts.bytes_of(BYTES.token_to_id(letter)) == bytes([byte]), letter


def test_best_tokens_have_their_bytes_too() -> None:
    first, second = _ids(BYTES, "é")
    told = TokenLogprobs(-1.0, ((first, -1.0), (second, -2.0)))
    (each,) = chat_logprobs(TokenTexts(BYTES), [(first, told)])["content"]
    assert each["token"] == "\N{REPLACEMENT CHARACTER}"
    assert [best["bytes"] for best in each["top_logprobs"]] == [[0xC3], [0xA9]]


def test_words_keep_the_space_before_them() -> None:
    """A decoder of its kind drops it at the beginning of a text."""
    texts = TokenTexts(FALLBACK)
    the, cat = (FALLBACK.token_to_id(piece) for piece in ("\u2581the", "\u2581cat"))
    assert [texts[the], texts[cat]] == [" the", " cat"]
    assert texts.bytes_of(cat) == b" cat"
    lists = CompletionLogprobs(texts)
    for token in (the, cat, cat):
        lists.add(token, LOGPROBS)
    assert lists.taken()["text_offset"] == [0, 4, 8]


def test_offsets_count_characters_of_several_tokens_once() -> None:
    text = "é漢😀x"
    lists = CompletionLogprobs(TokenTexts(BYTES))
    for token in _ids(BYTES, text):
        lists.add(token, LOGPROBS)
    assert lists.taken()["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3]


def test_special_tokens_have_the_bytes_of_their_names() -> None:
    texts = TokenTexts(BYTES)
    assert (texts[256], texts.bytes_of(256)) == ("<|endoftext|>", b"<|endoftext|>")


@pytest.mark.parametrize(("piece", "text"), [("\ufffd", "\ufffd"), ("\u2581\ufffd", " \ufffd")])
def test_a_replacement_character_of_a_vocabulary_is_itself(piece: str, text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.add_tokens([piece])
    assert TokenTexts(tokenizer).bytes_of(tokenizer.token_to_id(piece)) == text.encode()


def test_ids_without_a_token_have_no_bytes() -> None:
    """A model's vocabulary may be larger than its tokenizer's."""
    (each,) = chat_logprobs(TokenTexts(BYTES), [(999, LOGPROBS)])["content"]
    assert (each["token"], each["bytes"]) == ("", None)
