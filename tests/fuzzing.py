"""Inputs made from valid ones, by hypothesis, and what must hold for every input.

``DDP_SLURM_FUZZ=100000`` is the number of inputs over all targets; without it there are few.
"""

import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ddp_slurm.errors import DdpSlurmError

TARGETS = 13
FEW = 25
ASKED = int(os.environ.get("DDP_SLURM_FUZZ", "0"))
fuzz = settings(
    max_examples=max(FEW, -(-ASKED // TARGETS)),
    deadline=None,
    database=None,
    derandomize=not ASKED,
    suppress_health_check=list(HealthCheck),
)
"""Without DDP_SLURM_FUZZ the inputs are the same in each run."""

WORDS = [
    *("", "null", "~", "0", "-1", "00", "1e400", "99999999999999999999", "nan", "inf", "1_0"),
    *("\0", "\x1b[31m", "\x9b", "\u202e", "\ud800", "\u2028", "\x85", "\r", "\t", "\n"),
    *("²", "é", "[", "]", "{", "}", "(", ")", "[1-", "[0-99999999]", "a[1-3,x]", "(x99999999)"),
    *(",", ":", "::", "=", " = ", "%", "%j", "%%", "../../x", "/", "~root", "$(id)", "`id`"),
    *("'", '"', "\\", "#", "&a", "*a", "<<: *a", "!!python/object:os.system", "!!int", "---"),
    *("...", "? ", "- ", "|", ">", "true", "N/A", "(null)", "[N/A]", "[]", "{}", "12:30"),
    *("2026-01-01", "0x1F", "1-00:00:00", "UNLIMITED", "a" * 3000),
]
words = st.sampled_from(WORDS) | st.text(max_size=8) | st.integers().map(str)
Edit = tuple[float, int, str]
edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 40), words | st.just("\0copy")),
    min_size=1,
    max_size=6,
)


@st.composite
def texts(draw: st.DrawFn, *valid: str) -> str:
    """One of the valid texts with up to six pieces replaced, left out or repeated; or any text."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.text(max_size=200))
    text = draw(st.sampled_from(valid))
    for place, length, word in draw(edits):
        start = int(place * len(text))
        piece = text[start : start + length]
        text = text[:start] + (2 * piece if word == "\0copy" else word) + text[start + length :]
    return text


def data_of(text: str) -> bytes:
    """As the bytes of a file; a lone surrogate becomes a byte that is not UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def holds(*functions: Callable[[], Any], printable: bool = True) -> None:
    """Each function returns, or raises the project's own error, with a message for a terminal.

    ``printable=False``: where a message repeats what a program printed, it is the console that
    writes its control characters in another form.
    """
    for function in functions:
        try:
            result = function()
        except DdpSlurmError as error:
            result = str(error)
            assert result
        if isinstance(result, str) and printable:
            assert is_printable(result), repr(result)


CHANGES_OF_DIRECTION = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def is_printable(text: str) -> bool:
    """Whether a terminal shows the text in its order and does nothing else.

    What Unicode has not assigned yet is harmless, and differs with Python's version.
    """
    return not any(_is_command(character) for character in text if character not in "\n\t")


def _is_command(character: str) -> bool:
    is_control = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
    return is_control or unicodedata.bidirectional(character) in CHANGES_OF_DIRECTION


_folders: list[Path] = []
_outside: list[str] = []
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _folders:
        return
    if event == "open":
        path, _, flags = arguments
        is_write = isinstance(flags, int) and bool(flags & WRITES)
    else:
        path = arguments[0] if arguments else None
        is_write = event in ("os.rename", "os.remove", "os.mkdir", "os.symlink", "os.truncate")
    if is_write and isinstance(path, str | bytes | os.PathLike):
        _note(os.fsdecode(path))


def _note(path: str) -> None:
    whole = os.path.abspath(path)
    if not whole.startswith((str(_folders[-1]), "/dev/", "/proc/self/")):
        _outside.append(whole)


sys.addaudithook(_watch)


@contextlib.contextmanager
def no_write_outside(folder: Path) -> Iterator[None]:
    """Fails where a file outside the folder is opened for writing, moved or removed."""
    _outside.clear()
    _folders.append(folder.resolve())
    try:
        yield
    finally:
        _folders.pop()
    assert not _outside
