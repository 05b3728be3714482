"""A data set from its source to a folder: downloaded, checked, unpacked, with a manifest."""

import os
import shutil
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from filelock import FileLock

from ddp_slurm.console import say
from ddp_slurm.data import folder as folders
from ddp_slurm.data.download import Checksum, download
from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.progress import bar
from ddp_slurm.errors import counted, did_you_mean


class Source(NamedTuple):
    """Where a data set comes from."""

    place: str
    """A URL, or the path of a file."""
    checksum: Checksum | None
    """None only for a file of this machine."""

    @property
    def is_url(self) -> bool:
        return urlsplit(self.place).scheme in ("http", "https")

    @property
    def file_name(self) -> str:
        return urlsplit(self.place).path.rpartition("/")[2] or "data"


KNOWN = {
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        Checksum("md5", "c58f30108f718f92721af3b95e74349a"),  # pragma: allowlist secret
    ),
    "cifar100": Source(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        Checksum("md5", "eb9058c3a382ffc7106e4002c42a8d85"),  # pragma: allowlist secret
    ),
}
"""URLs and checksums of torchvision, which takes seconds to import and needs torch. The folder is
the one that torchvision's data set of that name reads."""


def source_of(name: str, checksum: Checksum | None) -> Source:
    """The source for what was typed: a known name, a URL, or a file. Raises DataSetError."""
    if name in KNOWN:
        if checksum is not None:
            raise DataSetError(f"--checksum cannot be combined with {name!r}, which has its own")
        return KNOWN[name]
    source = Source(name, checksum)
    if source.is_url and checksum is None:
        raise DataSetError(
            f"{name}: give its checksum, as the data set's publisher states it: "
            "--checksum sha256:HEX"
        )
    if not source.is_url and not Path(name).is_file():
        raise DataSetError(
            f"{name!r} is neither a file, nor an http:// or https:// URL, nor a known name"
            f"{did_you_mean(name, KNOWN)}"
        )
    return source


def prepare(source: Source, folder: Path) -> None:
    """Make ``folder`` with the data set in it: in full, or not at all.

    What was downloaded is kept beside it until then. Raises DataSetError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # of two at once the second waits
        if folder.exists():
            _check_existing(folder)
        else:
            _make(source, folder)


def _make(source: Source, folder: Path) -> None:
    archive = _archive(source, folder)
    unpacked = folder.with_name(f".{folder.name}.unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir()
    _unpack(archive, unpacked, source)
    with bar("checksums", None) as on_bytes:
        kept = folders.make(unpacked, on_bytes)
    folders.keep(kept, unpacked)
    unpacked.rename(folder)
    if str(archive) != source.place:
        archive.unlink()
    manifest = kept.manifest
    say(f"{folder}: {counted(len(manifest.files), 'file')}, {manifest.total:,} bytes")


def _check_existing(folder: Path) -> None:
    """Raises DataSetError for a folder that no earlier call has finished."""
    kept = folders.read(folder) if folder.is_dir() else None
    if kept is None:
        raise DataSetError(
            f"{folder}: already exists and was not made by data prepare; name another folder, or "
            "remove it"
        )
    for index in kept.changed(folder):
        raise DataSetError(
            f"{folder / kept.manifest.files[index].path}: was changed or removed after data "
            "prepare; remove the folder to prepare it again"
        )
    say(f"{folder}: already complete")


def _archive(source: Source, folder: Path) -> Path:
    if not source.is_url:
        if source.checksum is not None:
            source.checksum.check(Path(source.place), source.place)
        return Path(source.place)
    if source.checksum is None:
        raise DataSetError(f"{source.place}: has no checksum")
    # A name of the publisher's that is only a part of ours: it cannot lead elsewhere.
    path = folder.with_name(f".{folder.name}.{source.file_name}")
    download(source.place, path, source.checksum)
    return path


def _unpack(archive: Path, target: Path, source: Source) -> None:
    """The members of an archive, none of which leaves the folder; a file of another kind as is."""
    try:
        if tarfile.is_tarfile(archive):
            _unpack_tar(archive, target)
        elif zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as members:
                members.extractall(target)
        else:
            shutil.copyfile(archive, target / source.file_name)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataSetError(f"{source.place}: cannot be unpacked: {error}") from None


def _unpack_tar(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as members:
        if hasattr(tarfile, "data_filter"):
            # Refuses links and paths that lead out of the folder, and devices; drops owners.
            members.extractall(target, filter="data")
        else:  # Python before 3.10.12 and 3.11.4, such as Debian 12's
            members.extractall(target, members=[_checked(member) for member in members])


def _checked(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file or a folder within the target, of this user, without special rights."""
    member.name = member.name.lstrip("/")
    is_inside = ".." not in PurePosixPath(member.name).parts
    if not (is_inside and (member.isfile() or member.isdir())):
        raise tarfile.TarError(f"{member.name!r} is not a file or folder within the archive")
    member.mode &= 0o755
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    return member
