"""What the routes of a server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from tokenizers import Tokenizer

from ..engine import SamplingParams
from .chat.parsers import Parsers
from .chat.render import ChatTemplate
from .errors import ApiError, EngineError, bad_form, engine_ended
from .generation import Admission, Generation
from .jobs import EngineLink
from .logprobs import TokenTexts
from .metrics import Metrics
from .preparation import Preparation, kind_of
from .settings import Settings


@dataclass(frozen=True)
class Service:
    """A model that is served.

    Args:
        engine: serves it.
        tokenizer: of the model.
        models: names that requests may ask for; the first is what answers say.
        max_context: longest prompt plus text.
        max_batch: texts that run at once.
        settings: the limits.
        defaults: sampling fields that requests may omit, such as those of generation_config.json.
        template: of chats; None where the checkpoint has none.
        parsers: of tool calls and reasoning.
    """

    engine: EngineLink
    tokenizer: Tokenizer
    models: tuple[str, ...]
    max_context: int
    max_batch: int
    settings: Settings = field(default_factory=Settings)
    defaults: Mapping[str, float | int] = field(default_factory=dict)
    template: ChatTemplate | None = None
    parsers: Parsers = field(default_factory=Parsers)
    metrics: Metrics = field(default_factory=Metrics)
    admission: Admission = field(init=False)
    preparation: Preparation = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        most = self.max_batch + self.settings.max_queue
        object.__setattr__(self, "admission", Admission(most))
        object.__setattr__(self, "preparation", Preparation(self.settings.request_timeout))
        object.__setattr__(self, "created", int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Check that a request asks for a model that is here; None is the first.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.models:
            known = " or ".join(map(repr, self.models))
            raise ApiError(
                404,
                f"model: got {name[:100]!r}, expected {known}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return a text's token ids, without holding up other requests meanwhile.

        Args:
            text: a text.
            special: whether the tokenizer adds its own, such as a first token.

        Raises:
            ApiError: 400 for lone surrogates; as `Preparation.wait`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ApiError(
                400, f"prompt: got a text with {half!r}, expected valid Unicode", param="prompt"
            ) from None
        encode = partial(self.tokenizer.encode, text, add_special_tokens=special)
        encoding = await self.preparation.run(kind_of(text), encode)
        ids: list[int] = encoding.ids
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        decode = partial(self.tokenizer.decode, list(ids), skip_special_tokens=False)
        text: str = await self.preparation.run(kind_of(ids), decode)
        return text

    def end_all(self) -> None:
        """End all requests, since the server stops."""
        self.preparation.end()
        self.engine.end_all(EngineError("the server is stopping"))

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Texts of single tokens."""
        return TokenTexts(self.tokenizer)

    def close(self) -> None:
        """End all requests and the template's process, and stop the engine's link."""
        self.preparation.close()
        self.engine.stop()
        if self.template is not None:
            self.template.close()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        form_field: str = "structured_outputs",
    ) -> Generation:
        """Start to generate a text for each prompt.

        Args:
            prompts: token ids.
            params: of each prompt.
            form_field: the request's field that holds the form of the texts.

        Raises:
            ApiError: when the request is refused.
        """
        if params[0].structured is not None:
            try:  # not by the engine's thread, which other requests wait for
                compiled = self.engine.compile_grammar(params[0].structured)
                await self.preparation.wait(asyncio.wrap_future(compiled))
            except ValueError as error:
                raise bad_form(form_field, error) from error
            except RuntimeError as error:  # without xgrammar
                raise ApiError(501, str(error), code="not_installed") from error
            except EngineError as error:
                raise engine_ended(error, draining=self.admission.draining) from error
        generation = Generation(
            self.engine,
            self.admission,
            self.metrics,
            prompts,
            params,
            self.preparation.deadline(),
            form_field=form_field,
        )
        await generation.start()
        return generation
