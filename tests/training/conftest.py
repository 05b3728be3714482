"""What torch writes beside the tests' own folders goes into one of theirs."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_slurm.training import Snapshot

from .snapshots import state


@pytest.fixture(autouse=True, scope="session")
def _torch_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch._dynamo, which the worlds' server loads, makes a folder for every user of a machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor"))
        )
        yield


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """Of step 2, with that of step 1 as the previous one, in a folder with a hostile name."""
    snapshot = Snapshot(tmp_path / 'a folder\'s "name"\n' / "snap shot.pt")
    snapshot.save(state(1))
    snapshot.save(state(2))
    return snapshot


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # the lock's file is still open
