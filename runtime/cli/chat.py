"""`chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import Command, Parser, UserError, user_errors
from .sampling import add_sampling_flags, sampling_params
from .served_model import add_served_model_flags, run_served, service_of

if TYPE_CHECKING:
    from ..engine import SamplingParams
    from ..parallel import Ranks
    from ..server import Service

_EPILOG = """\
Lines of standard input are messages. /reset forgets the conversation; /exit and the end of the
input leave. Ctrl-C ends an answer where it is, and leaves when nothing is being answered.
"""


def _main(argv: Sequence[str]) -> int:
    return run_served(_parser().parse_args(argv), _chat)


def _chat(args: argparse.Namespace, folder: Path, ranks: Ranks | None) -> int:
    from ..server import Settings
    from ..server.chat.templates import load_chat_template

    settings = Settings()
    with user_errors():
        given = sampling_params(args)
        if load_chat_template(folder, settings.template_timeout) is None:
            raise UserError(f"MODEL: {args.model} has no chat template: use `ostinato generate`")
    service = service_of(args, folder, settings, ranks)
    try:
        defaults: dict[str, Any] = {"max_tokens": service.max_context, **service.defaults}
        own = {name: value for name, value in defaults.items() if not hasattr(args, name)}
        params = replace(given, **own)
        _converse(service, params, args.system)
    finally:
        service.close()
    return 0


def _converse(service: Service, params: SamplingParams, system: str | None) -> None:
    from ..server.chat.render import TemplateFault
    from ..server.errors import ApiError

    start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    with asyncio.Runner() as runner:
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            if line.strip() == "/exit":
                return
            if line.strip() == "/reset":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            said: list[str] = []
            try:
                runner.run(_answer(service, params, messages, said))
            except KeyboardInterrupt:
                pass  # what has been said stays
            except (ApiError, TemplateFault) as error:
                print(getattr(error, "detail", error), file=sys.stderr)
                messages.pop()
                continue
            print(flush=True)
            messages.append({"role": "assistant", "content": "".join(said)})


async def _answer(
    service: Service, params: SamplingParams, messages: list[dict[str, Any]], said: list[str]
) -> None:
    """Print the answer as it comes, and add its pieces to `said`."""
    from ..server.api.fields import checked_max_tokens

    assert service.template is not None
    variables = {"add_generation_prompt": True}
    text = await asyncio.to_thread(service.template.render, messages, variables=variables)
    prompt = await service.encode(text, special=False)
    most = checked_max_tokens(None, len(prompt), service.max_context, params.max_tokens)
    async with await service.generate([prompt], [replace(params, max_tokens=most)]) as generation:
        async for events in generation:
            for progress in events:
                said.append(progress.event.text)
                print(progress.event.text, end="", flush=True)


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato chat",
        usage="python -m ostinato chat MODEL [options]",
        description="Talk with a model in the terminal.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_served_model_flags(parser)
    parser.add_argument(
        "--system", metavar="TEXT", help="message that every conversation begins with"
    )
    add_sampling_flags(parser)
    return parser


COMMAND = Command("talk with a model in the terminal", _main)
