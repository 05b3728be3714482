"""Reading a job's log while it grows, whole or one rank's lines."""

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES = 64 * 1024


class RankFilter:
    """Tells one rank's lines from the others' by the label that srun or the local backend puts before them.

    srun: ``4: text``, the number padded to the width of the last one; local: ``[4 alpha] text``.
    """

    def __init__(self, rank: int) -> None:
        self._label = re.compile(rf" *0*{rank}: ?|\[ *{rank} [^]]*\] ")

    def text(self, line: str) -> str | None:
        """The line without its label, None for a line that is not this rank's."""
        match = self._label.match(line)
        return line[match.end() :] if match else None

    def __call__(self, line: str) -> bool:
        return self._label.match(line) is not None


class GrowingLog:
    """A log file that may not be there yet, is written by others, and is continued when the job is requeued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self, *, ended: bool = False) -> Iterator[str]:
        """Whole lines since the last call; with ``ended`` also a last one without an end."""
        try:
            with self.path.open("rb") as file:
                if (
                    file.seek(0, 2) < self._offset
                ):  # emptied, as --open-mode=truncate does at a requeue
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                for chunk in iter(lambda: file.read(1 << 20), b""):
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    yield from (line.decode(errors="replace") for line in lines)
        except FileNotFoundError:
            return
        if ended and self._rest:
            rest, self._rest = self._rest, b""
            yield rest.decode(errors="replace")


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(deque(text.splitlines(), lines))
