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


def catches(number: int, pid: int) -> bool:
    """Whether the process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) & 1 << number - 1)


def running_module(module: str, word: str) -> list[int]:
    """The processes ``python -m module`` of this machine whose arguments include the word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if arguments[1:3] == ["-m", module] and word in arguments:
            found.append(int(folder.name))
    return found
