"""Fields that completions and chats share, and the sampling parameters that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...engine import SamplingParams, StructuredOutput
from ..errors import ApiError, bad_value

_MOST_FIELDS = 256  # of one object: pydantic reports every unknown one
_SEED_MODULUS = 2**63

StopString = Annotated[str, Field(max_length=1024)]
StopStrings = Annotated[list[StopString], Field(max_length=32, fail_fast=True)]


class Fields(BaseModel):
    """A JSON object of a request: unknown fields and wrong types are refused.

    An unknown field that is null says nothing, and is passed over: some clients send all they know.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > _MOST_FIELDS:
            raise ValueError(f"got {len(data)} fields, expected at most {_MOST_FIELDS}")
        if isinstance(data, dict):
            known = {item.alias or name for name, item in cls.model_fields.items()}
            return {k: value for k, value in data.items() if value is not None or k in known}
        return data


class StreamOptions(Fields):
    """What a stream says besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class Schema(Fields):
    """A JSON schema with its name, which nothing depends on."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The form of an answer in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    def form(self) -> StructuredOutput | None:
        """Return the form; None for a text.

        Raises:
            ApiError: 400, when it is none.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(
                400, "response_format: expected json_schema with its type", param="response_format"
            )
        if self.json_schema is not None:
            return _form("response_format", json_schema=self.json_schema.schema_)
        return _form("response_format", json_object=True) if self.type == "json_object" else None


class Structure(Fields):
    """The form of an answer in vLLM's API: one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=4096, fail_fast=True)] | None = None
    grammar: str | None = None

    def form(self) -> StructuredOutput:
        """Return the form.

        Raises:
            ApiError: 400, when it is none, or several.
        """
        return _form(
            "structured_outputs",
            json_schema=self.json_,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
        )


def _form(param: str, **fields: Any) -> StructuredOutput:
    try:
        return StructuredOutput(**fields)
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error


class SamplingFields(Fields):
    """Fields of OpenAI's API, and of vLLM's, that say how a text goes on."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    user: str | None = None  # a name for the client's own records; nothing depends on it
    seed: int | None = None
    stop: str | StopStrings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=256, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structure | None = None

    def structured(self) -> StructuredOutput | None:
        """Return the form that the text must have, if any.

        Raises:
            ApiError: 400, when it is no form, or there are two.
        """
        forms = [self.response_format, self.structured_outputs]
        found = [form for item in forms if item is not None and (form := item.form()) is not None]
        if len(found) > 1:
            raise ApiError(
                400,
                "structured_outputs: got response_format, too, expected one of them",
                param="structured_outputs",
            )
        return found[0] if found else None

    @property
    def form_field(self) -> str:
        """The name of the field that holds the form."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def checked_max_tokens(self, prompt: int, max_context: int, default: int) -> int:
        """Return `max_completion_tokens`, or else `max_tokens`, as `checked_max_tokens` does."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return checked_max_tokens(getattr(self, name), prompt, max_context, default, name=name)

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings, of which there may be none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_in_stream(self) -> bool:
        """Whether the last event of a stream says how many tokens there were.

        Raises:
            ApiError: for options of a stream that is none.
        """
        if self.stream_options is None:
            return False
        if not self.stream:
            raise ApiError(
                400, "stream_options: expected stream to be true", param="stream_options"
            )
        return bool(self.stream_options.include_usage)


# Fields that `SamplingParams` has under the same name.
_NAMED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "min_tokens", "include_stop_str_in_output"),
)


def sampling_params(
    body: SamplingFields,
    max_tokens: int,
    defaults: Mapping[str, float | int],
    choices: int,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> list[SamplingParams]:
    """Return the parameters of each choice; with a seed s, choice i has s + i.

    Args:
        body: of the request.
        max_tokens: of each choice.
        defaults: of fields that the request omits.
        choices: how many.
        logprobs: best tokens to report for each token of the text.
        prompt_logprobs: the same of the prompt.

    Raises:
        ApiError: 400, naming the field.
    """
    given: dict[str, Any] = {
        name: value for name in _NAMED if (value := getattr(body, name)) is not None
    }
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if (structured := body.structured()) is not None:
        given["structured"] = structured
    given.setdefault("temperature", defaults.get("temperature", 1.0))
    for name, default in defaults.items():
        given.setdefault(name, default)
    given["top_k"] = max(given.get("top_k", 0), 0)  # others write -1 for all
    try:
        if body.seed is not None and not 0 <= body.seed < _SEED_MODULUS:
            raise ValueError(f"seed: got {body.seed}, expected 0 to 2**63 - 1")
        return [
            SamplingParams(
                max_tokens=max_tokens,
                seed=None if body.seed is None else (body.seed + choice) % _SEED_MODULUS,
                stop=body.stop_strings(),
                stop_token_ids=tuple(body.stop_token_ids or ()),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                **given,
            )
            for choice in range(choices)
        ]
    except (TypeError, ValueError) as error:
        raise bad_value(error) from error


def checked_max_tokens(
    wanted: int | None, prompt: int, max_context: int, default: int, *, name: str = "max_tokens"
) -> int:
    """Return how many tokens may be generated.

    Args:
        wanted: by the request.
        prompt: tokens of the prompt.
        max_context: of prompt and text together.
        default: where the request does not say; it is cut to what the context leaves.
        name: of the request's field.

    Raises:
        ApiError: 400, when the context does not hold them.
    """
    left = max_context - prompt
    if left < 1 or (wanted is not None and wanted > left):
        more = "" if wanted is None else f" and {wanted} to generate"
        raise ApiError(
            400,
            f"{name}: got a prompt of {prompt} tokens{more}, expected at most {max_context} "
            "together",
            param=name,
            code="context_length_exceeded",
        )
    if wanted is not None and wanted < 1:
        raise ApiError(400, f"{name}: got {wanted}, expected at least 1", param=name)
    return min(default, left) if wanted is None else wanted


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise ApiError(
            400, f"logit_bias: got {text[:40]!r}, expected token ids", param="logit_bias"
        )
    return int(text)
