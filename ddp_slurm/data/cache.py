"""The data sets that a node has: one folder each, complete under its name, or absent.

``FOLDER/DIGEST`` is a complete data set, ``.DIGEST.part`` one that is being fetched, and
``.url-...`` which one a server had when it was last asked.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path

from filelock import FileLock

from ddp_slurm import trust
from ddp_slurm.data import folder as folders
from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.folder import Kept
from ddp_slurm.data.manifest import Manifest
from ddp_slurm.data.pieces import Pieces
from ddp_slurm.files import write_own


def default_folder() -> Path:
    """On a local disk of most machines, and kept over a reboot, unlike /tmp."""
    return Path(f"/var/tmp/ddp_slurm_data.{os.geteuid()}")


class Cache:
    """The cache of one user on this node. Raises DdpSlurmError where others can write to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            trust.make_folder(folder)
        except OSError as error:
            raise DataSetError(f"{folder}: {error.strerror}") from None

    def lock(self, manifest: Manifest) -> FileLock:
        """One process a node fetches a data set. The kernel frees the lock when it dies."""
        return FileLock(self.folder / f".{manifest.digest}.lock")

    def known(self, url: str) -> Kept | None:
        """The complete data set that a server had when it was last asked."""
        try:
            digest = trust.read_text(self._note(url))
        except FileNotFoundError:
            return None
        if not re.fullmatch("[0-9a-f]{32}", digest):
            return None
        return folders.read(self.folder / digest)

    def note(self, url: str, manifest: Manifest) -> None:
        """Remember which data set a server has."""
        write_own(self._note(url), manifest.digest)

    def _note(self, url: str) -> Path:
        return self.folder / f".url-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def complete(self, manifest: Manifest) -> Path:
        """Where a complete data set is, or will be."""
        return self.folder / manifest.digest

    def is_complete(self, manifest: Manifest) -> bool:
        """Whether it exists and no file has changed its size or time since it was written."""
        folder = self.complete(manifest)
        kept = folders.read(folder)
        return kept is not None and not kept.changed(folder)

    def open(self, manifest: Manifest) -> tuple[Pieces, int]:
        """The folder to fetch into, and the pieces that it has, as bits.

        A complete data set of which a file was changed is repaired where it is. Raises
        DataSetError where the disk is too small, or OSError.
        """
        complete = self.complete(manifest)
        kept = folders.read(complete) if complete.exists() else None
        folder = complete if kept else self._partial(manifest)
        folder.mkdir(exist_ok=True)
        suspects = self._suspects(kept, manifest)
        for file in manifest.files:
            if (folder / file.path).is_symlink():  # in the place of a file
                (folder / file.path).unlink()
        pieces = Pieces(manifest, folder)
        self._check_space(folder, manifest)
        if pieces.make_files(folder) and kept is None:
            return pieces, 0
        have = 0
        for piece in range(len(manifest.pieces)):
            if piece not in suspects or pieces.holds(piece):
                have |= 1 << piece
        return pieces, have

    def _suspects(self, kept: Kept | None, manifest: Manifest) -> set[int]:
        """The pieces that have to be read to find out whether they are intact."""
        if kept is None:
            return set(range(len(manifest.pieces)))
        changed = kept.changed(self.complete(manifest))
        return {piece for index in changed for piece in manifest.pieces_of(index)}

    def _check_space(self, folder: Path, manifest: Manifest) -> None:
        used = sum(
            (folder / file.path).stat().st_blocks * 512
            for file in manifest.files
            if (folder / file.path).exists()
        )
        free = shutil.disk_usage(folder).free
        if free + used < manifest.total:
            raise DataSetError(
                f"{self.folder}: the data set has {manifest.total:,} bytes, the disk has {free:,} "
                "bytes free; make space, or give another folder by --dataset-cache"
            )

    def finish(self, pieces: Pieces) -> None:
        """Give a data set that has all pieces its name. Raises DdpSlurmError, or OSError."""
        manifest = pieces.manifest
        complete, partial = self.complete(manifest), self._partial(manifest)
        pieces.sync()
        folder = partial if partial.exists() else complete
        folders.keep(Kept(manifest, folders.stamps_of(manifest.files, folder)), folder)
        if folder == partial:
            if complete.exists():  # without a manifest: not ours, or from a crash
                shutil.rmtree(complete)
            partial.rename(complete)

    def _partial(self, manifest: Manifest) -> Path:
        return self.folder / f".{manifest.digest}.part"
