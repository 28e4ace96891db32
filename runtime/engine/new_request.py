"""Makes a request of what a caller asks for, or says what is wrong with it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from ostinato.graphs.arguments import as_integer

from ..models import ModelConfig, PagedKVCache
from .detokenizer import Detokenizer
from .logits_processing import MOST_EDITS
from .ranks.requests import ReceivedGrammars
from .request import Request
from .sampling_params import SamplingParams
from .stop_strings import split_stop
from .structured.grammar import GrammarCompiler, Matcher

Prompt = str | Sequence[int]
Grammars = GrammarCompiler | ReceivedGrammars


def new_request(
    prompt: Prompt,
    sampling_params: SamplingParams,
    *,
    tokenizer: Tokenizer,
    config: ModelConfig,
    cache: PagedKVCache,
    max_context: int,
    grammars: Grammars | None,
    timed: bool = True,
) -> Request:
    """Return a request that has no id yet.

    Args:
        prompt: a text or token ids.
        sampling_params: how to go on.
        tokenizer: of the model.
        config: of the model.
        cache: which must hold the whole text, if need be alone.
        max_context: the longest prompt plus text.
        grammars: of an engine that processes logits; None where it does not.
        timed: as of `Matcher`.

    Raises:
        TypeError, ValueError: as `Engine.submit`.
    """
    if not isinstance(sampling_params, SamplingParams):
        raise TypeError(f"sampling_params: got {sampling_params!r}, expected SamplingParams")
    tokens = _tokens(prompt, tokenizer)
    if not tokens:
        raise ValueError("prompt: got no tokens, expected at least one")
    _check_ids("prompt", tokens, config.vocab_size)
    if len(tokens) >= max_context:
        raise ValueError(
            f"prompt: got {len(tokens)} tokens, expected fewer than max_context = {max_context}"
        )
    max_new_tokens = min(sampling_params.max_tokens, max_context - len(tokens))
    _check_ids("stop_token_ids", sampling_params.stop_token_ids, config.vocab_size)
    stop, special = split_stop(tokenizer, sampling_params.stop)
    stop_ids = {*sampling_params.stop_token_ids, *special}
    if not sampling_params.ignore_eos:
        stop_ids.update(config.eos_token_ids)
    _check_ids("logit_bias", sampling_params.logit_bias, config.vocab_size)
    # Tokenizers may know ids that the model's logits do not have.
    forbidden = frozenset(
        token for token in stop_ids if sampling_params.min_tokens and token < config.vocab_size
    )
    if grammars is None:
        _check_plain(sampling_params)
    biases = len(sampling_params.logit_bias)
    if biases + len(forbidden) > MOST_EDITS:
        name = "logit_bias" if biases >= len(forbidden) else "stop_token_ids"
        raise ValueError(
            f"{name}: got {biases} biases and {len(forbidden)} tokens that end a text, expected at "
            f"most {MOST_EDITS} together"
        )
    matcher = None
    if sampling_params.structured is not None and grammars is not None:
        matcher = Matcher(grammars.compile(sampling_params.structured), timed=timed)
    request = Request(
        id=-1,
        prompt=tokens,
        sampling_params=sampling_params,
        seed=secrets.randbits(63) if sampling_params.seed is None else sampling_params.seed,
        max_new_tokens=max_new_tokens,
        stop_ids=frozenset(stop_ids),
        forbidden_ids=forbidden,
        matcher=matcher,
        detokenizer=Detokenizer(
            tokenizer,
            tokens,
            stop,
            hidden=config.eos_token_ids,
            include_stop=sampling_params.include_stop_str_in_output,
        ),
    )
    needed = cache.pages_for(request.final_length)
    if needed > cache.usable_pages:
        raise ValueError(
            f"prompt: got {len(tokens)} tokens, which with {max_new_tokens} more need {needed} "
            f"pages; expected at most the cache's {cache.usable_pages}"
        )
    return request


def prompts_with_params(
    prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its parameters.

    Raises:
        TypeError, ValueError: for no prompts, or not one for all or one each.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        kind = "one string" if isinstance(prompts, str) else type(prompts).__name__
        raise TypeError(f"prompts: got {kind}, expected a sequence of prompts")
    if not prompts:
        raise ValueError("prompts: got none, expected at least one")
    if isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params] * len(prompts)
    if not isinstance(sampling_params, Sequence):
        raise TypeError(
            f"sampling_params: got {sampling_params!r}, expected SamplingParams, or one each"
        )
    if len(sampling_params) != len(prompts):
        raise ValueError(
            f"sampling_params: got {len(sampling_params)}, expected one or {len(prompts)}"
        )
    return list(zip(prompts, sampling_params, strict=True))


def _tokens(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(prompt, str):
        try:  # Python's texts may hold halves of characters, which tokenizers take for no text
            prompt.encode()
        except UnicodeEncodeError as error:
            half = prompt[error.start]
            raise ValueError(f"prompt: got a text with {half!r}, expected valid Unicode") from error
        return tuple(tokenizer.encode(prompt).ids)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return tuple(as_integer("prompt", token) for token in prompt)
    raise TypeError(f"prompt: got {prompt!r}, expected a text or a sequence of token ids")


def _check_plain(params: SamplingParams) -> None:
    """Refuse what an engine without `logits_processing` has no graphs for."""
    for name in params.processed_fields:
        value, expected = getattr(params, name), getattr(SamplingParams(), name)
        raise ValueError(
            f"{name}: got {value!r}, expected {expected!r}: only an engine made with "
            "logits_processing=True serves others"
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    strange = next((token for token in ids if not 0 <= token < vocab_size), None)
    if strange is not None:
        raise ValueError(f"{name}: got token id {strange}, expected 0 to {vocab_size - 1}")
