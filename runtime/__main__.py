"""`ostinato`, or `python -m ostinato`: the process around `ostinato.cli.main`."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from .cli.interrupt import INTERRUPTED


def run() -> NoReturn:
    """Run the command line and end the process: `ostinato`, or `python -m ostinato`."""
    # A shell script starts its background jobs with SIGINT ignored; Ctrl-C shall work there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Read when torch is loaded. OpenMP threads that spin instead of sleeping keep each other off a
    # busy processor: a small model's step took 70 times as long beside two other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = _run()
    if code == INTERRUPTED or (code and "WORLD_SIZE" in os.environ):
        # `main` has flushed what was printed. A normal exit might print the traceback of a second
        # Ctrl-C, or end by the signal instead of the code when the first one hit an import; and
        # where a rank is lost, it might wait for it in a library.
        os._exit(code)
    sys.exit(code)


def _run() -> int:
    try:
        # Imported here, so that Ctrl-C is caught while it lasts.
        from .cli.main import main

        _open_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            # A model may write what the terminal's encoding cannot show.
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _open_closed_streams() -> None:
    """Put the null device where the caller closed a standard stream: Python leaves None there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    run()
