"""A data set as a list of its files and the checksums of its pieces.

The files follow each other in one stream of bytes, which is cut into pieces of one size: a million
small files are a thousand pieces, and one large file is as many.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ddp_slurm.data.errors import DataSetError
from ddp_slurm.errors import printable, quoted

KEPT_NAME = ".ddp-slurm-manifest.json"
"""The file in a data set's folder that is not part of it: the manifest, as it was made."""
FORMAT = 1
MIN_PIECE_BYTES = 2**18
MAX_PIECE_BYTES = 2**24
"""A node holds some ten pieces in memory."""
USUAL_PIECES = 1024
"""Nodes report which pieces they have with one bit each, twice a second."""


class File(NamedTuple):
    """A file of a data set."""

    path: str
    """Below the folder, with ``/``."""
    bytes: int


class Span(NamedTuple):
    """A part of a file."""

    file: int
    """Its index in ``Manifest.files``."""
    offset: int
    length: int


def piece_size(total: int) -> int:
    """The bytes of a piece, a power of two, for a data set of ``total`` bytes."""
    size = MIN_PIECE_BYTES
    while size * USUAL_PIECES < total and size < MAX_PIECE_BYTES:
        size *= 2
    return size


@dataclass(frozen=True)
class Manifest:
    """The files of a data set, in order, and the SHA-256 of each piece of their bytes."""

    files: tuple[File, ...]
    piece_bytes: int
    """Of each piece but the last."""
    pieces: tuple[str, ...]
    """In hexadecimal."""

    @cached_property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)

    @cached_property
    def text(self) -> str:
        """As JSON; the same files give the same text."""
        data = {
            "format": FORMAT,
            "files": [[file.path, file.bytes] for file in self.files],
            "piece_bytes": self.piece_bytes,
            "pieces": self.pieces,
        }
        return json.dumps(data, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """Which data set it is: the SHA-256 of ``text``, 32 hexadecimal digits of it."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(file.bytes for file in self.files))

    def spans(self, piece: int) -> Iterator[Span]:
        """The parts of files that a piece is made of, in order; none of them is empty."""
        position = piece * self.piece_bytes
        stop = min(position + self.piece_bytes, self.total)
        index = bisect_right(self._ends, position)
        while position < stop:
            file = self.files[index]
            offset = position - (self._ends[index] - file.bytes)
            length = min(file.bytes - offset, stop - position)
            if length:
                yield Span(index, offset, length)
            position += length
            index += 1

    def pieces_of(self, index: int) -> range:
        """The pieces that hold bytes of a file."""
        end = self._ends[index]
        begin = end - self.files[index].bytes
        if begin == end:
            return range(0)
        return range(begin // self.piece_bytes, (end - 1) // self.piece_bytes + 1)

    @classmethod
    def read(cls, text: str | bytes, where: str) -> "Manifest":
        """A manifest of JSON. Raises DataSetError, which names ``where``, for any other text."""
        try:
            data = json.loads(text)
            manifest = cls(
                files=tuple(File(_safe_path(path), _count(size)) for path, size in data["files"]),
                piece_bytes=_count(data["piece_bytes"]),
                pieces=tuple(_checksum(piece) for piece in data["pieces"]),
            )
            _check(manifest, data["format"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataSetError(f"{where}: not a manifest of a data set: {error}") from None
        return manifest


def _check(manifest: Manifest, version: Any) -> None:
    """Raises ValueError."""
    if version != FORMAT:
        raise ValueError(f"its format is {quoted(version)}, expected {FORMAT}")
    if not 1 <= manifest.piece_bytes <= MAX_PIECE_BYTES:
        raise ValueError(f"pieces of {manifest.piece_bytes} bytes")
    paths = [file.path for file in manifest.files]
    if len(set(paths)) < len(paths):
        raise ValueError("duplicate path")
    needed = -(-manifest.total // manifest.piece_bytes)
    if len(manifest.pieces) != needed:
        raise ValueError(f"{len(manifest.pieces)} pieces, expected {needed}")


def _safe_path(path: Any) -> str:
    """A path that stays below the folder. Raises ValueError."""
    if not isinstance(path, str) or not path:
        raise ValueError(f"the path {quoted(path)}")
    parts = path.split("/")
    leaves = PurePosixPath(path).is_absolute() or {"", ".", ".."} & set(parts)
    if leaves or path == KEPT_NAME:
        raise ValueError(f"the path {quoted(path)} is not one below the folder of the data set")
    if printable(path) != path or "\n" in path:
        raise ValueError(f"the path {quoted(path)} has a control character in it")
    return path


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{quoted(value)} is not a whole number >= 0")
    return value


def _checksum(value: Any) -> str:
    is_text = isinstance(value, str) and len(value) == 64
    if not is_text or set(value) - set("0123456789abcdef"):
        raise ValueError(f"{quoted(value)} is not a SHA-256 in hexadecimal")
    return str(value)
