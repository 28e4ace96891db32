"""Log-probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from ..engine import TokenLogprobs

_LEAST = -9999.0  # instead of minus infinity, which JSON does not have
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # of tokenizers whose unknown characters are bytes


def _byte_letters() -> dict[str, int]:
    """Return which byte a letter of a byte-level tokenizer's vocabulary stands for.

    Bytes that are printable in Latin-1 stand for themselves, and the letters behind U+00FF for the
    others (`bytes_to_unicode` of GPT-2).
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(byte for byte in range(256) if chr(byte) not in letters)
    return {letter: ord(letter) if ord(letter) < 256 else next(others) for letter in letters}


_BYTES = _byte_letters()


class TokenTexts:
    """Texts and bytes of single tokens within a text, special ones included.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """Return a token's text; half a character is U+FFFD."""
        if token not in self._texts:
            self._texts[token] = self._text(token)
        return self._texts[token]

    def bytes_of(self, token: int) -> bytes | None:
        """Return what a token adds to the UTF-8 of a text; None where that is not known."""
        text, piece = self[token], self._tokenizer.id_to_token(token)
        if piece is None:
            return None
        if _INCOMPLETE not in text or _INCOMPLETE in piece:
            return text.encode()
        if found := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        if all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        return None

    def _text(self, token: int) -> str:
        alone, twice = self._decode([token]), self._decode([token, token])
        # A decoder may drop the space before a text's first word, or, as that of WordPiece, have
        # marks in it: the second one is as a text goes on.
        return twice.removeprefix(alone) if twice.startswith(alone) else alone

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


class CompletionLogprobs:
    """`logprobs` of a completion's choice: lists that grow with its tokens.

    Args:
        texts: of tokens.
        offset: in the answer's text, where the first token begins.
    """

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self._texts = texts
        self._offset = offset
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._lists = _empty()

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token; the first of a prompt has no log-probabilities."""
        text, lists = self._texts[token], self._lists
        lists["tokens"].append(text)
        lists["text_offset"].append(self._offset)
        own_bytes = self._texts.bytes_of(token)
        # A character may be of several tokens, of each of which the text alone is U+FFFD.
        self._offset += len(text if own_bytes is None else self._characters.decode(own_bytes))
        if logprobs is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        own = _finite(logprobs.logprob)
        lists["token_logprobs"].append(own)
        best: dict[str, float] = {}
        for other, value in logprobs.top:
            # Of tokens with one text, such as halves of characters, the best one counts.
            best.setdefault(self._texts[other], _finite(value))
        best.setdefault(text, own)
        lists["top_logprobs"].append(best)

    def taken(self) -> dict[str, list[Any]]:
        """Return what has been added since the last call."""
        lists, self._lists = self._lists, _empty()
        return lists


def chat_logprobs(texts: TokenTexts, tokens: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
    """Return `logprobs` of a chat's choice for tokens of its text."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        own = texts.bytes_of(token)
        return {
            "token": texts[token],
            "logprob": _finite(logprob),
            "bytes": None if own is None else list(own),
        }

    return {
        "content": [
            {
                **described(token, logprobs.logprob),
                "top_logprobs": [described(other, value) for other, value in logprobs.top],
            }
            for token, logprobs in tokens
        ],
        "refusal": None,
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
