"""The command line as a function: which commands there are, and how a run of one may end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from .. import __version__
from ..jit.errors import KernelError
from . import batch, build, chat, env, generate, kernels, quantize, serve, tune
from .bench import group as bench
from .command import FAILED, NO_MORE_IS_WRITTEN, Command, Parser, UserError
from .interrupt import INTERRUPTED
from .ranks import have_met, is_heard

COMMANDS: dict[str, Command] = {
    "generate": generate.COMMAND,
    "chat": chat.COMMAND,
    "serve": serve.COMMAND,
    "run-batch": batch.COMMAND,
    "quantize": quantize.COMMAND,
    "bench": bench.COMMAND,
    "tune": tune.COMMAND,
    "build": build.COMMAND,
    "kernels": kernels.COMMAND,
    "env": env.COMMAND,
}
USER_ERROR = 2
BROKEN_PIPE = 128 + signal.SIGPIPE
_RANK_0_PRINTS_S = 5.0  # it may still be starting


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the command and its arguments; those of the process by default.

    Raises:
        SystemExit: after --help and --version.
    """
    name = "ostinato"
    try:
        try:
            chosen = _parser().parse_args(argv)
            if chosen.command not in COMMANDS:
                got = chosen.command or "nothing"
                raise UserError(f"got {got}, expected {' or '.join(COMMANDS)}")
            name = f"ostinato {chosen.command}"
            return COMMANDS[chosen.command].main(chosen.arguments)
        finally:
            sys.stdout.flush()
    except UserError as error:
        _say(name, error)
        return USER_ERROR
    except RuntimeError as error:
        if not _says_what_to_do(error):
            raise
        # Not one line: it may end with what the compiler said, or with what is known of a capture.
        _say(name, error)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in NO_MORE_IS_WRITTEN:
            raise
        _drop_output()
        print(f"{name}: error: {error}", file=sys.stderr)
        return FAILED


def _say(name: str, error: Exception) -> None:
    """Print an error, of several ranks on rank 0, or where that one cannot or does not know it."""
    failures = getattr(error, "failures", {})
    if is_heard() or failures.get(0, "failed:").partition(":")[0] != "failed":
        print(f"{name}: error: {error}", file=sys.stderr)
        return
    # torchrun ends rank 0 as soon as this process has ended, and this one once rank 0 has: as it
    # does where both have made the same mistake.
    time.sleep(_RANK_0_PRINTS_S)
    if not have_met():
        print(f"{name}: error on rank {os.environ.get('RANK')}: {error}", file=sys.stderr)


def _drop_output() -> None:
    """Forget what is still buffered, which must not fail again when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _says_what_to_do(error: RuntimeError) -> bool:
    """Return whether an error is of a kernel that cannot be had or a step that is not captured."""
    if isinstance(error, KernelError):
        return True
    # Not at the top: commands are listed without torch.
    from ostinato.graphs import GraphError

    return isinstance(error, GraphError)


def _parser() -> Parser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {c.summary}" for name, c in COMMANDS.items())
    parser = Parser(
        prog="ostinato",
        usage="python -m ostinato COMMAND ...",
        description=f"LLM decode in which every step is captured once and replayed.\n\n"
        f"commands:\n{commands}",
        epilog="`python -m ostinato COMMAND --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ostinato {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
