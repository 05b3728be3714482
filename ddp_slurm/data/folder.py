"""The folder of a data set: its manifest is made, kept in it, and read again."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.manifest import KEPT_NAME, File, Manifest, piece_size
from ddp_slurm.data.pieces import CHUNK_BYTES, Pieces, Stamp, stamp_of
from ddp_slurm.files import write_whole

OnBytes = Callable[[int], object]
"""Is called with the number of bytes that were read since the last call."""


@dataclass(frozen=True)
class Kept:
    """A manifest that is kept in a folder, with the stamps of the files that it was made of."""

    manifest: Manifest
    stamps: tuple[Stamp, ...]

    def changed(self, folder: Path) -> list[int]:
        """The files that are missing, or have another size or time, by their index."""
        return [
            index
            for index, file in enumerate(self.manifest.files)
            if _stamp(folder / file.path) != self.stamps[index]
        ]


def find_files(folder: Path) -> list[File]:
    """The files of a data set, in order.

    Raises DataSetError for an empty folder, a link out of it or to a folder, a special file, and
    a name that no manifest may have.
    """
    root = folder.resolve()
    files = []
    for path in _walk(folder):
        target = path.resolve()
        if not target.is_relative_to(root):
            raise DataSetError(f"{path}: is a link that leaves {folder}; put the file in its place")
        if not target.is_file():
            raise DataSetError(f"{path}: is neither a file nor a link to one; remove it")
        files.append(File(path.relative_to(folder).as_posix(), target.stat().st_size))
    if not files:
        raise DataSetError(f"{folder}: has no files")
    return sorted(files)


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataSetError(f"{error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*names, *links):
            if name != KEPT_NAME:
                yield Path(parent, name)


def make(folder: Path, on_bytes: OnBytes) -> Kept:
    """Read all files of a folder. Raises DataSetError, also for a file that changes meanwhile."""
    files = find_files(folder)
    stamps = stamps_of(files, folder)
    size = piece_size(sum(file.bytes for file in files))
    manifest = Manifest(tuple(files), size, _checksums(folder, files, size, on_bytes))
    # with the checks of those that come from elsewhere: of names, above all
    kept = Kept(Manifest.read(manifest.text, str(folder)), stamps)
    for index in kept.changed(folder):
        raise DataSetError(f"{folder / files[index].path}: changed while it was read")
    return kept


def _checksums(folder: Path, files: list[File], size: int, on_bytes: OnBytes) -> tuple[str, ...]:
    pieces: list[str] = []
    checksum, filled = hashlib.sha256(), 0
    for file in files:
        with open(folder / file.path, "rb") as stream:
            while data := stream.read(min(CHUNK_BYTES, size - filled)):
                checksum.update(data)
                filled += len(data)
                on_bytes(len(data))
                if filled == size:
                    pieces.append(checksum.hexdigest())
                    checksum, filled = hashlib.sha256(), 0
    if filled:
        pieces.append(checksum.hexdigest())
    return tuple(pieces)


def keep(kept: Kept, folder: Path) -> None:
    """Write the manifest into the folder. Raises DdpSlurmError."""
    data = {"manifest": kept.manifest.text, "stamps": kept.stamps}
    write_whole(folder / KEPT_NAME, json.dumps(data))


def stamps_of(files: Iterable[File], folder: Path) -> tuple[Stamp, ...]:
    """The files' present stamps. Raises OSError."""
    return tuple(stamp_of(os.stat(folder / file.path)) for file in files)


def read(folder: Path) -> Kept | None:
    """What ``keep`` wrote; None where there is nothing. Raises DataSetError."""
    path = folder / KEPT_NAME
    try:
        data = json.loads(path.read_bytes())
        manifest = Manifest.read(data["manifest"], str(path))
        stamps = tuple(Stamp(int(size), int(time)) for size, time in data["stamps"])
        if len(stamps) != len(manifest.files):
            raise ValueError("expected a stamp for each file")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataSetError(f"{path}: {error}; remove it, to have it made again") from None
    return Kept(manifest, stamps)


def find_or_make(folder: Path, on_bytes: OnBytes) -> tuple[Kept, bool]:
    """The folder's manifest, and whether it was made now, since files are new or have changed."""
    if not folder.is_dir():
        raise DataSetError(f"{folder}: is not a folder")
    kept = read(folder)
    if kept is not None:
        same_files = list(kept.manifest.files) == find_files(folder)
        if same_files and not kept.changed(folder):
            return kept, False
    return make(folder, on_bytes), True


def check(folder: Path, on_bytes: OnBytes) -> list[str]:
    """Read all files; returns the paths in pieces that do not match. Raises DataSetError."""
    kept = read(folder)
    if kept is None:
        raise DataSetError(f"{folder}: has no {KEPT_NAME}; data serve and data prepare write it")
    manifest = kept.manifest
    pieces = Pieces(manifest, folder)
    bad: dict[str, None] = {}
    for piece in range(len(manifest.pieces)):
        if not pieces.holds(piece):
            bad.update(dict.fromkeys(manifest.files[s.file].path for s in manifest.spans(piece)))
        on_bytes(sum(span.length for span in manifest.spans(piece)))
    pieces.close()
    return list(bad)


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))
    except OSError:
        return None
