"""Shared by the tests that need neither Slurm nor a network."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clusters import UNEVEN


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """A cluster.yaml of 1, 2 and 4 GPUs, its order against the order of names."""
    path = tmp_path / "cluster.yaml"
    path.write_text(UNEVEN)
    return path


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    """A folder whose name has what breaks unquoted shell text."""
    folder = tmp_path / "it's a \"dir\" $HOME & 'more';"
    folder.mkdir()
    return folder


Stub = Callable[[str, str], Path]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Puts an executable of the given name and shell text first on PATH."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, text: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return make


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def submit(tmp_path: Path) -> Command:
    """Runs ``python -m ddp_slurm.submit ARGS`` in ``tmp_path``; Slurm's programs only as stubs."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cat", "env", "true"):
        (tools / name).symlink_to(shutil.which(name) or name)

    def run(
        *args: str, env: dict[str, str] | None = None, cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PATH": f"{tmp_path / 'stubs'}{os.pathsep}{tools}", **(env or {})}
        command = [sys.executable, "-m", "ddp_slurm.submit", *args]
        return subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60
        )

    return run
