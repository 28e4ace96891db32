"""Log-probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from ..engine import TokenLogprobs

_LEAST = -9999.0  # instead of minus infinity, which JSON does not have


class TokenTexts:
    """Texts of single tokens, special ones included.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._texts:
            text: str = self._tokenizer.decode([token], skip_special_tokens=False)
            self._texts[token] = text
        return self._texts[token]


class CompletionLogprobs:
    """`logprobs` of a completion's choice: lists that grow with its tokens.

    Args:
        texts: of tokens.
        offset: in the answer's text, where the first token begins.
    """

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self._texts = texts
        self._offset = offset
        self._lists = _empty()

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token; the first of a prompt has no log-probabilities."""
        text, lists = self._texts[token], self._lists
        lists["tokens"].append(text)
        lists["text_offset"].append(self._offset)
        self._offset += len(text)
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
    return {
        "content": [
            {
                **_token(texts[token], logprobs.logprob),
                "top_logprobs": [_token(texts[other], value) for other, value in logprobs.top],
            }
            for token, logprobs in tokens
        ],
        "refusal": None,
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
