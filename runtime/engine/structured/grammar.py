"""Grammars: compiled in a process of their own, followed token by token here."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from ...line_process import LineProcess, NoAnswerError, Silence
from .output import StructuredOutput

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

_WORKER = Path(__file__).with_name("grammar_worker.py")
_START_SECONDS = 120.0  # importing what it needs, on a busy machine
_COMPILE_SECONDS = 10.0
_WORKER_BYTES = 2 << 30
_MOST_ANSWER = 64 << 20  # bytes of a compiled grammar, serialised
_CACHE_BYTES = 256 << 20


# Time of the host's that a text's grammar may take, in which all texts wait: a mask takes some 0.1
# ms, but there are grammars for which it takes seconds.
_SECONDS = 0.5
_SECONDS_PER_TOKEN = 0.002


class Matcher:
    """A text's place in its grammar.

    Args:
        compiled: the grammar.
        timed: whether `accept` refuses a token when the grammar has taken too long. Otherwise
            somebody must ask for `overdue`: ranks, whose times differ, have to do the same.
    """

    def __init__(self, compiled: CompiledGrammar, *, timed: bool = True) -> None:
        from xgrammar import GrammarMatcher

        self.compiled = compiled
        self._matcher = GrammarMatcher(compiled)
        self._timed = timed
        self._seconds_left = _SECONDS

    @property
    def overdue(self) -> bool:
        """Whether the grammar has taken more than half a second, and 2 ms for each token."""
        return self._seconds_left < 0

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Write which tokens may come next into a row of masks [n, words] int32 on the host."""
        started = time.thread_time()
        self._matcher.fill_next_token_bitmask(masks, row)
        self._seconds_left -= time.thread_time() - started

    def accept(self, token: int) -> bool:
        """Go on behind a token; return whether the text can go on.

        It cannot where the grammar does not allow the token, or, where it is timed, is overdue.
        """
        started = time.thread_time()
        allowed = self._matcher.accept_token(token)
        self._seconds_left -= time.thread_time() - started - _SECONDS_PER_TOKEN
        return allowed and not (self._timed and self.overdue)

    def fault(self) -> str | None:
        """Return why the text cannot go on, as the end of a message; None where it can."""
        if self.overdue:
            return "got a grammar that takes too long to follow"
        words = -(-self.compiled.tokenizer_info.vocab_size // 32)
        mask = torch.zeros(1, words, dtype=torch.int32)
        self.fill(mask, 0)
        return None if mask.any() else "got a grammar that no token can follow from here"

    def undo(self) -> None:
        """Go back to before the last token."""
        self._matcher.rollback(1)


class GrammarCompiler:
    """Compiles what callers ask for, and keeps the last results.

    Calls may come from any thread; one compiles at a time, and a call for what is kept does not
    wait for it. A text that takes longer than 10 s or
    more than 2 GiB is refused, and harms nothing but the process that compiles it.

    Args:
        tokenizer: of the model.
        vocab_size: of the model's logits.
        eos_token_ids: the tokens that end a text.
        seconds: how long a compilation may take.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        seconds: float = _COMPILE_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._seconds = seconds
        self._lock = threading.Lock()  # of what is kept
        self._compiling = threading.Lock()  # of the process
        self._info: TokenizerInfo | None = None
        self._worker: _Worker | None = None
        self._closing = False
        self._kept: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Return the grammar of a form.

        Raises:
            ValueError: for a form that is no grammar, that no token begins, or that takes too long
                or too much memory, or a model without an end-of-sequence id.
            RuntimeError: without xgrammar, naming the extra.
        """
        found = self._find(structured)
        if found is not None:
            return found
        with self._compiling:
            found = self._find(structured)  # another thread's
            if found is None:
                found = self._compiled(structured)
                self._keep(structured, found)
            return found

    def deserialized(self, text: str) -> CompiledGrammar:
        """Return a grammar that another rank's compiler has made, from its serialised form."""
        from xgrammar import CompiledGrammar

        return CompiledGrammar.deserialize_json(text, self._tokenizer_info())

    def keeps(self, structured: StructuredOutput) -> bool:
        """Return whether a call for this form returns at once."""
        return self._find(structured) is not None

    def close(self) -> None:
        """End the process, and with it what is being compiled; the next call starts another."""
        self._closing = True
        if (worker := self._worker) is not None:
            worker.kill()
        with self._compiling:
            self._end_worker()
            self._closing = False

    def _find(self, structured: StructuredOutput) -> CompiledGrammar | None:
        with self._lock:
            found = self._kept.get(structured)
            if found is not None:
                self._kept.move_to_end(structured)
            return found

    def _keep(self, structured: StructuredOutput, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._kept[structured] = compiled
            while len(self._kept) > 1 and self._kept_bytes() > _CACHE_BYTES:
                self._kept.popitem(last=False)

    def _compiled(self, structured: StructuredOutput) -> CompiledGrammar:
        if not self._eos_token_ids:
            raise ValueError(
                "structured: got a form, expected None: the model has no end-of-sequence id"
            )
        try:
            from xgrammar import CompiledGrammar
        except ImportError as error:
            raise RuntimeError(
                "structured: xgrammar is missing: pip install 'ostinato[serve]'"
            ) from error
        info = self._tokenizer_info()
        kind = structured.kind
        try:
            answer = self._ask([kind, structured.text], info)
        except _WorkerError as error:
            self._end_worker()
            raise ValueError(f"{kind}: got a text whose grammar {error}") from error
        except BaseException:
            self._end_worker()  # with an answer that nobody reads
            raise
        if "error" in answer:
            # Behind the time and the place in xgrammar's sources.
            told = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", answer["error"]).strip()
            raise ValueError(f"{kind}: got a text that is no grammar: {told[:500]}")
        if answer["empty"]:
            raise ValueError(f"{kind}: got a text that no token begins, expected one that some do")
        return CompiledGrammar.deserialize_json(answer["grammar"], info)

    def _ask(self, question: list[object], info: TokenizerInfo) -> dict[str, Any]:
        fresh = self._worker is None
        if self._worker is None:
            self._worker = _Worker(info.serialize_json())
        if self._closing:
            raise _WorkerError("could not be compiled: the compiler is being closed")
        try:
            return self._worker.ask(question, self._seconds)
        except _WorkerError as error:
            if fresh or not error.gone:
                raise
            self._end_worker()  # somebody, such as a system without memory, had ended it since
            return self._ask(question, info)

    def _kept_bytes(self) -> int:
        return sum(compiled.memory_size_bytes for compiled in self._kept.values())

    def _tokenizer_info(self) -> TokenizerInfo:
        if self._info is None:
            from xgrammar import TokenizerInfo

            # A special token adds no text, so that no grammar may count on it: empty ones are never
            # allowed.
            added = self._tokenizer.get_added_tokens_decoder()
            special = {number for number, token in added.items() if token.special}
            words = [""] * self._vocab_size
            for word, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
                if number < self._vocab_size and number not in special:
                    words[number] = word
            how = TokenizerInfo._detect_metadata_from_hf(self._tokenizer.to_str())
            self._info = TokenizerInfo(
                words,
                how["vocab_type"],
                vocab_size=self._vocab_size,
                stop_token_ids=self._eos_token_ids,
                add_prefix_space=how["add_prefix_space"],
            )
        return self._info

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _WorkerError(Exception):
    """Why a worker has no answer: the predicate of a sentence about a grammar.

    `gone`: it had ended before it was asked.
    """

    def __init__(self, predicate: str, *, gone: bool = False) -> None:
        super().__init__(predicate)
        self.gone = gone


class _Worker:
    """The process of `grammar_worker.py`."""

    def __init__(self, description: str) -> None:
        environment = {"PATH": os.environ.get("PATH", ""), "CUDA_VISIBLE_DEVICES": ""}
        self._process = LineProcess(_WORKER, environment, quiet=True)
        try:
            self.ask([description, _WORKER_BYTES], _START_SECONDS)
        except BaseException as error:
            self.end()
            if isinstance(error, _WorkerError):
                raise _WorkerError("cannot be compiled: no process starts for it") from error
            raise

    def ask(self, question: list[object], seconds: float) -> dict[str, Any]:
        """Return the answer to a line."""
        line = json.dumps(question).encode()
        try:
            answered = self._process.ask(line, seconds, most_bytes=_MOST_ANSWER)
        except NoAnswerError as error:
            predicates = {
                Silence.UNREAD: f"is not read within {seconds:g} s",
                Silence.GONE: "could not be compiled: its process has ended",
                Silence.LATE: f"takes longer than {seconds:g} s to compile",
                Silence.ENDED: "ended the process that compiles it, which has 2 GiB for it",
                Silence.LONG: f"is larger than {_MOST_ANSWER} bytes",
            }
            gone = error.reason is Silence.GONE
            raise _WorkerError(predicates[error.reason], gone=gone) from error
        answer: dict[str, Any] = json.loads(answered)
        return answer

    def kill(self) -> None:
        """End the process while another thread may be asking it."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process and wait for its end."""
        self._process.end()
