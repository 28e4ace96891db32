"""Requests on their way from rank 0 to the others, as JSON."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..request import Request
from ..sampling_params import SamplingParams
from ..structured.output import StructuredOutput

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

    from ..structured.grammar import GrammarCompiler

_MOST_CHARACTERS = 64 << 20  # of compiled grammars that every rank keeps


class GrammarLog:
    """Which compiled grammars the other ranks have: the ones used last, of bounded size.

    It depends on the order of uses alone, so that rank 0 knows what each other rank has kept.
    """

    def __init__(self) -> None:
        self._lengths: OrderedDict[StructuredOutput, int] = OrderedDict()
        self._total = 0

    def uses(self, structured: StructuredOutput) -> bool:
        """Note a use, and return whether the grammar is there."""
        if structured not in self._lengths:
            return False
        self._lengths.move_to_end(structured)
        return True

    def add(self, structured: StructuredOutput, length: int) -> list[StructuredOutput]:
        """Note a new one of so many characters, and return which ones go."""
        self._lengths[structured] = length
        self._total += length
        gone = []
        while self._total > _MOST_CHARACTERS and len(self._lengths) > 1:
            oldest, its = self._lengths.popitem(last=False)
            self._total -= its
            gone.append(oldest)
        return gone


class ReceivedGrammars:
    """Grammars that rank 0 has compiled: compiling takes a time that differs between ranks.

    Args:
        compiler: of this rank's engine, which knows the tokenizer.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._log = GrammarLog()
        self._kept: dict[StructuredOutput, CompiledGrammar] = {}

    def take(self, document: dict[str, Any]) -> None:
        """Take what a request came with: a grammar, unless it is here."""
        structured, text = received_params(document).structured, document["grammar"]
        if structured is None:
            return
        if text is None:
            self._log.uses(structured)
            return
        self._kept[structured] = self._compiler.deserialized(text)
        for gone in self._log.add(structured, len(text)):
            del self._kept[gone]

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Return the grammar of a form, which has been received."""
        return self._kept[structured]


def request_document(request: Request, sent: GrammarLog) -> dict[str, Any]:
    """Return what another rank needs to make the same request.

    Args:
        request: one that was queued.
        sent: the grammars that the others have; it notes this request's.
    """
    params = request.sampling_params
    document = asdict(params) | {"seed": request.seed, "structured": None}
    document["logit_bias"] = list(params.logit_bias.items())
    grammar = None
    if params.structured is not None and request.matcher is not None:
        document["structured"] = asdict(params.structured)
        if not sent.uses(params.structured):
            grammar = request.matcher.compiled.serialize_json()
            sent.add(params.structured, len(grammar))
    return {
        "prompt": list(request.prompt),
        "params": document,
        "grammar": grammar,
    }


def received_params(document: dict[str, Any]) -> SamplingParams:
    """Return the parameters in such a document."""
    fields = dict(document["params"])
    fields["logit_bias"] = dict(fields["logit_bias"])
    if fields["structured"] is not None:
        fields["structured"] = StructuredOutput(**fields["structured"])
    return SamplingParams(**fields)
