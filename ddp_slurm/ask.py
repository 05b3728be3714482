"""The one way to run another program of this machine and to read its answer."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

NOT_FOUND, TIMED_OUT = 127, 124
"""Exit statuses of a program that cannot be started, and of one that was stopped at its limit.

The same numbers as those of a shell and of timeout(1).
"""


class Answer(NamedTuple):
    """What a program returned."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Standard error, else standard output, without white space at the ends."""
        return self.err.strip() or self.out.strip()


Ask = Callable[[Sequence[str]], Answer]
"""Anything that runs a program; tests pass a fake one."""


def ask(
    argv: Sequence[str],
    *,
    timeout_seconds: float | None = None,
    environ: Mapping[str, str] | None = None,
    input: bytes = b"",
) -> Answer:
    """Run a program to its end and return its exit status, standard output and standard error.

    Never raises: a program that cannot be started, or that did not end within ``timeout_seconds``,
    is an answer with status NOT_FOUND or TIMED_OUT and the reason in ``err``.

    Args:
        environ: its whole environment; None inherits this process's.
        input: its standard input.
    """
    try:
        done = subprocess.run(
            argv, input=input, capture_output=True, env=environ, timeout=timeout_seconds
        )
    except OSError as error:
        return Answer(NOT_FOUND, "", f"{argv[0]}: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Answer(TIMED_OUT, "", f"{argv[0]} did not respond within {timeout_seconds:g} s")
    return Answer(done.returncode, _decoded(done.stdout), _decoded(done.stderr))


def _decoded(output: bytes) -> str:
    # Not text=True: with errors="replace" the input would be changed as well.
    return output.decode(errors="replace")
