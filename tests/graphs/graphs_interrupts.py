"""What a signal handler raises, at a chosen instruction of the package."""

import os
import sys

import ostinato.graphs

FOLDER = os.path.dirname(ostinato.graphs.__file__)


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest takes for its own."""


def is_interrupted_at(event, call):
    """Raise at an instruction of the package that `call` comes to; return whether there is one."""
    left = event

    def trace(frame, kind, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        if kind == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Interrupt
        return trace

    # Python 3.12 sends no such events to a function that is set before a frame asks for them.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0
