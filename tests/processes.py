"""Processes of a test that end with it, also when it fails."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def running(command: list[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """Run the command; standard output and error are one pipe unless the settings differ."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **{**pipes, **settings}) as process:
        try:
            yield process
        finally:
            process.kill()


def is_alive(pid: int) -> bool:
    """Whether the process runs: one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
