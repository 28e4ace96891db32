"""Stop strings that a text can end with, and those that are special tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


def split_stop(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[tuple[str, ...], set[int]]:
    """Return the stop strings that are ordinary text, and the ids of those that are special tokens.

    Special tokens add no text, so that none of them is found in it.

    Raises:
        ValueError: for a stop string that has a special token in it beside other text, which
            neither a text nor a token can match.
    """
    if not stop:
        return (), set()
    special = {
        token.content: number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    for text in stop:
        within = next((content for content in special if content in text), None)
        if text not in special and within is not None:
            raise ValueError(
                f"stop: got {text!r}, expected ordinary text, or the special token {within!r} alone"
            )
    return (
        tuple(text for text in stop if text not in special),
        {special[text] for text in stop if text in special},
    )
