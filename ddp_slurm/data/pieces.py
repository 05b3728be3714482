"""The pieces of a data set on a disk: read, checked and written below one folder."""

import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.manifest import Manifest, Span

CHUNK_BYTES = 2**20


class Stamp(NamedTuple):
    """By which a changed file is found without reading it."""

    bytes: int
    modified_ns: int


class Pieces:
    """The pieces of a manifest in a folder. Keeps working when the folder is renamed.

    Args:
        stamps: of the files when their checksums were made: a file that has another one is not
            read any more.
    """

    def __init__(
        self, manifest: Manifest, folder: Path, stamps: Sequence[Stamp] | None = None
    ) -> None:
        self.manifest = manifest
        self._stamps = stamps
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        os.close(self._folder)

    def open(self, index: int, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a file.

        Raises DataSetError for one that a link leads out of the folder to, or that has changed,
        and OSError.
        """
        path = self.manifest.files[index].path
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o644, dir_fd=self._folder)
        try:
            self._check(descriptor, index)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check(self, descriptor: int, index: int) -> None:
        # What was opened, not what the path means now: a folder on the way may have become a link.
        folder, real = _real_path(self._folder), _real_path(descriptor)
        path = self.manifest.files[index].path
        if not real.startswith(f"{folder}/"):
            raise DataSetError(f"{path}: is a link that leaves the folder of the data set")
        if self._stamps is not None and stamp_of(os.fstat(descriptor)) != self._stamps[index]:
            raise DataSetError(f"{path}: was changed after its checksums were made")

    def chunks(self, piece: int) -> Iterator[bytes]:
        """The bytes of a piece, at most 1 MiB at a time. Raises DataSetError, or OSError."""
        for span in self.manifest.spans(piece):
            descriptor = self.open(span.file)
            try:
                yield from self._read(descriptor, span)
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int, span: Span) -> Iterator[bytes]:
        offset, stop = span.offset, span.offset + span.length
        while offset < stop:
            data = os.pread(descriptor, min(CHUNK_BYTES, stop - offset), offset)
            if not data:
                raise DataSetError(f"{self.manifest.files[span.file].path}: is too short")
            yield data
            offset += len(data)

    def holds(self, piece: int) -> bool:
        """Whether the bytes on the disk are those of the manifest."""
        checksum = hashlib.sha256()
        try:
            for chunk in self.chunks(piece):
                checksum.update(chunk)
        except (OSError, DataSetError):
            return False
        return checksum.hexdigest() == self.manifest.pieces[piece]

    def put(self, piece: int, data: bytes) -> bool:
        """Write a piece; False, and nothing is written, where it does not match its checksum."""
        if hashlib.sha256(data).hexdigest() != self.manifest.pieces[piece]:
            return False
        begin = 0
        for span in self.manifest.spans(piece):
            descriptor = self.open(span.file, os.O_WRONLY)
            try:
                part = memoryview(data)[begin : begin + span.length]
                written = 0
                while written < span.length:
                    written += os.pwrite(descriptor, part[written:], span.offset + written)
            finally:
                os.close(descriptor)
            begin += span.length
        return True

    def make_files(self, folder: Path) -> bool:
        """Make all files with their sizes; True where all are new, so that they hold no piece."""
        are_new = True
        for index, file in enumerate(self.manifest.files):
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            are_new &= not (folder / file.path).exists()
            descriptor = self.open(index, os.O_WRONLY | os.O_CREAT)
            os.ftruncate(descriptor, file.bytes)
            os.close(descriptor)
        return are_new

    def sync(self) -> None:
        """Wait until the disk has all files: a crash would leave zeros in files of full size."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(self._folder):  # of the folder's file system alone, unlike os.sync
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def stamp_of(info: os.stat_result) -> Stamp:
    return Stamp(info.st_size, info.st_mtime_ns)


def _real_path(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
