"""Reading a job's log while it grows, whole or one rank's lines."""

import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ddp_slurm import trust
from ddp_slurm.errors import printable

CHUNK_BYTES = 1 << 20
TAIL_LINES = 20
TAIL_BYTES = 64 * 1024


class RankFilter:
    """Selects one rank's lines by the label that srun or the local backend puts before them.

    srun: ``4: text``, the number padded to the width of the last one; local: ``[4 alpha] text``.
    """

    def __init__(self, rank: int) -> None:
        label = rf" *0*{rank}: ?|\[ *{rank} [^]\n]*\] "
        self._label = re.compile(label)
        self._line = re.compile(rf"^(?:{label}).*\n?", re.MULTILINE)

    def text(self, line: str) -> str | None:
        """The line without its label, None for a line that is not this rank's."""
        match = self._label.match(line)
        return line[match.end() :] if match else None

    def lines(self, text: str) -> str:
        """This rank's lines of a text of whole lines, with their labels."""
        return "".join(self._line.findall(text))


class GrowingLog:
    """A log file that may not exist yet, and is continued when the job is requeued.

    Of this user's own log, and of root's, the text is as it was written, with its colours and
    progress bars; in another user's, control characters are replaced by escapes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_ours = True
        self._offset = 0
        self._cut_line: list[bytes] = []
        """The pieces of a last line whose end is not written yet."""

    def new_text(self, *, ended: bool = False) -> Iterator[str]:
        """The whole lines since the last call, in large pieces.

        With ``ended`` a last line without an end is whole, too, and gets its end.
        """
        for chunk in self._new_chunks():
            end = chunk.rfind(b"\n") + 1
            if not end:
                self._cut_line.append(chunk)
                continue
            pieces = [*self._cut_line, chunk[:end]]
            self._cut_line = [chunk[end:]]
            yield self._text(b"".join(pieces))
        last = b"".join(self._cut_line) if ended else b""
        if last:
            self._cut_line = []
            yield self._text(last) + "\n"

    def _text(self, line: bytes) -> str:
        text = line.decode(errors="replace")
        return text if self._is_ours else printable(text)

    def _new_chunks(self) -> Iterator[bytes]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            self._is_ours = trust.is_ours(os.fstat(file.fileno()).st_uid)
            if file.seek(0, 2) < self._offset:  # emptied: --open-mode=truncate, at a requeue
                self._offset = 0
                self._cut_line = []
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                self._offset += len(chunk)
                yield chunk


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
