"""Calls in a forked child."""

import os
import signal
import warnings
from collections.abc import Callable


def in_a_fork(function: Callable[[], object]) -> str:
    """Run `function` in a forked child; return the name of the exception that it raised there."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks among threads
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            function()
            os.write(write, b"nothing")
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer
