"""The text of the tiny checkpoint: Python's own documentation topics, split once and for all.

Every CPython carries the text behind `help("lambda")` in `pydoc_data.topics`: about half a million
characters, a quarter of which repeat another topic word for word (`help("for")` is a section of
`help("compound")`). A held-back topic that also stands in the training text would measure memory
instead of prediction, so repeated paragraphs are dropped before anything is trained or measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pydoc_data.topics import topics as python_topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

# About 5% of the text, prose and grammar, long and short; no other topic repeats them except "in",
# which `deduplicate` therefore drops.
HELD_OUT_TOPICS = ("comparisons", "raise", "slicings", "truth")

# Shorter paragraphs ("Changed in version 3.8:", "Note:") belong to the language, not to one topic.
MIN_REPEATED_CHARS = 60


def split_corpus(topics: Mapping[str, str] = python_topics) -> tuple[str, str]:
    """Return `(train_text, heldout_text)`: each document preceded by `END_OF_TEXT`.

    `heldout_text` is the whole text of `HELD_OUT_TOPICS`. `train_text` holds all other topics,
    longest first, without any paragraph of at least `MIN_REPEATED_CHARS` characters that already
    stands in the held-back text or in an earlier topic. The result depends on `topics` alone; the
    default is the running Python's, which differs between Python versions (see `sha256_of`).

    Raises `ValueError` when `topics` lacks a held-back topic.
    """
    missing = [name for name in HELD_OUT_TOPICS if name not in topics]
    if missing:
        raise ValueError(f"topics: got none named {missing}, expected all of {HELD_OUT_TOPICS}")
    held_out = [topics[name].strip() for name in HELD_OUT_TOPICS]
    others = [topics[name].strip() for name in sorted(topics) if name not in HELD_OUT_TOPICS]
    others.sort(key=len, reverse=True)
    return _join(deduplicate(others, seen_in=held_out)), _join(held_out)


def deduplicate(documents: list[str], *, seen_in: list[str]) -> list[str]:
    """Drop paragraphs that stand in `seen_in` or in an earlier document, whatever their spacing.

    A document that loses half of its text or more is dropped altogether: what remains are headings.
    """
    seen = {_normalize(paragraph) for document in seen_in for paragraph in document.split("\n\n")}
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in document.split("\n\n"):
            key = _normalize(paragraph)
            if key not in seen or len(key) < MIN_REPEATED_CHARS:
                paragraphs.append(paragraph)
            seen.add(key)
        remaining = "\n\n".join(paragraphs)
        if 2 * len(remaining) > len(document):
            kept.append(remaining)
    return kept


def sha256_of(text: str) -> str:
    """Hex digest of the text's UTF-8 bytes, by which a log names the corpus it was made from."""
    return hashlib.sha256(text.encode()).hexdigest()


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) of exactly `vocab_size` tokens.

    All 256 bytes are tokens, so that any text round-trips; `END_OF_TEXT` is the special token 0.
    No token is added to an encoded prompt. Raises `ValueError` when `text` is too short for
    `vocab_size` tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split(END_OF_TEXT), trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise ValueError(
            f"vocab_size: got {vocab_size}, expected at least 257 and at most the {found} tokens "
            f"that {len(text)} characters yield"
        )
    return tokenizer


def _join(documents: list[str]) -> str:
    return "".join(END_OF_TEXT + document for document in documents)


def _normalize(paragraph: str) -> str:
    return " ".join(paragraph.split())
