"""Calls a function in a forked process and returns its error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable


def raised_in_fork(call: Callable[[], object]) -> tuple[int, str]:
    """The process id, and type and message of the error, or "nothing was raised"."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test is about threads that do not survive the fork
        child = os.fork()
    if not child:
        try:
            call()
            os.write(write, b"nothing was raised")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return child, told
