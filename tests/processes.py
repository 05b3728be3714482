"""Processes of a test that end with it, also when it fails."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def running(command: list[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """The command, its standard output a pipe and its standard error one too, with the output or as the settings say."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **{**pipes, **settings}) as process:
        try:
            yield process
        finally:
            process.kill()
