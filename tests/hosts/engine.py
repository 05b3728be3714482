"""A container engine of the tests' own, and images for it that come from no registry.

All that the engine keeps is in one folder and a temporary one, which are removed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_slurm.lab.network import NETNS_FOLDER

from ..waiting import wait_until

ROOT = Path(__file__).parents[2]
IMAGE = "ddp-slurm-test:1"
CLUSTER = """\
name: boxes
nodes:
  - {name: one, address: 127.0.0.1, gpus: 1, cpus: 2}
  - {name: two, address: 127.0.0.1, gpus: 2, cpus: 2}
"""


@dataclass(frozen=True)
class Engine:
    """A running dockerd."""

    environ: dict[str, str]

    def docker(self, *words: str | Path) -> str:
        done = subprocess.run(
            ["docker", *words], env=self.environ, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def containers(self) -> list[str]:
        """The names of those that run."""
        return self.docker("ps", "--format", "{{.Names}}").split()

    def check_nothing_is_left(self) -> None:
        """All containers are removed, which takes a busy machine a moment."""
        wait_until(lambda: self.docker("ps", "--all", "--quiet") == "", "the removal")


@contextmanager
def start_engine(folder: Path, netns: str | None = None) -> Iterator[Engine]:
    """An engine that keeps all in ``folder`` and ends with the block.

    Without ``netns`` it has no networks of its own: its containers use this machine's.
    """
    # Elsewhere, since the path of a socket may have 107 characters.
    exec_root = tempfile.mkdtemp(prefix="ddp-engine-")
    words = [f"--data-root={folder}/data", f"--exec-root={exec_root}"]
    words += [f"--pidfile={folder}/pid", f"--host=unix://{folder}/sock"]
    if netns is None:
        words += ["--iptables=false", "--ip6tables=false", "--bridge=none"]
    # Not "ip netns exec", which hides the cgroups.
    inside = ["nsenter", f"--net={NETNS_FOLDER / netns}"] if netns else []
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with log.open("w") as file:
        daemon = subprocess.Popen([*inside, "dockerd", *words], stdout=file, stderr=file)
    try:
        wait_until(lambda: "API listen" in log.read_text(), log.read_text)
        environ = {**os.environ, "DOCKER_HOST": f"unix://{folder}/sock"}
        yield Engine(environ)
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)
        # dockerd leaves a mount behind, with which the folder could not be removed.
        for mount in Path(exec_root, "netns").glob("*"):
            subprocess.run(["umount", str(mount)], check=False)
        shutil.rmtree(exec_root)
        shutil.rmtree(folder / "data")


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def make_root(root: Path) -> None:
    """A Debian or Ubuntu root of this machine's release, with Python."""
    release = Path("/etc/os-release").read_text()
    codename = release.partition("VERSION_CODENAME=")[2].split()[0]
    packages = "--include=python3,python3-venv"
    bootstrap = ["debootstrap", "--variant=minbase", packages, codename, str(root)]
    subprocess.run(bootstrap, check=True, stdout=subprocess.DEVNULL, timeout=900)


def import_root(engine: Engine, root: Path, tag: str, *changes: str) -> None:
    """Make an image of the root; ``changes`` are lines of a Dockerfile such as ``ENV PATH=...``."""
    archive = root.with_suffix(f".{tag.partition(':')[0]}.tar")
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
    options = [word for change in changes for word in ("--change", change)]
    engine.docker("import", *options, archive, tag)
    archive.unlink()


def job_words(container: str, *, mounts_python: bool = True) -> list[str]:
    """``ddp-slurm submit`` and its options; the image may lack Python's packages."""
    words = [sys.executable, "-m", "ddp_slurm.submit", "--backend", "torchrun"]
    words += ["--container", container]
    if mounts_python:
        words += ["--python", sys.executable, "--env", f"PYTHONPATH={ROOT}"]
        for place in _python_folders():
            words += ["--mount", f"{place}:{place}:ro"]
    return words


def _python_folders() -> set[str]:
    """This interpreter with its packages; not /usr, which the image has of the same release."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    found = {sys.prefix, sys.base_prefix, str(Path(torch.origin).parents[1]), str(ROOT)}
    tops = {place for place in found if not any(is_below(place, other) for other in found)}
    return tops - {"/usr"}


def is_below(place: str, other: str) -> bool:
    return place != other and Path(place).is_relative_to(other)


def start_job(
    environ: dict[str, str], folder: Path, options: list[str], *command: str
) -> "subprocess.Popen[str]":
    """Two nodes on this machine with 1 and 2 ranks; the job runs in the folder."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    return subprocess.Popen(
        [*options, "--", *command],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_job(
    environ: dict[str, str], folder: Path, options: list[str], *command: str
) -> tuple[int, str]:
    """The exit status and the output."""
    process = start_job(environ, folder, options, *command)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output
