"""``--container docker:`` in a real engine: two hosts with 1 and 2 ranks, without GPUs.

The engine is one of the test's own, with nothing but a socket. Its image is a Debian root that came
from no registry: Python's packages, torch and this package are mounted.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..waiting import wait_until

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "synthetic_data_example" / "train.py"
CLUSTER = """\
name: boxes
nodes:
  - {name: one, address: 127.0.0.1, gpus: 1, cpus: 2}
  - {name: two, address: 127.0.0.1, gpus: 2, cpus: 2}
"""
IMAGE = "ddp-slurm-test:1"
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not os.environ.get("DDP_SLURM_TEST_CONTAINERS"),
        reason="starts a container engine: make test-containers",
    ),
]


@dataclass(frozen=True)
class Engine:
    """A running dockerd."""

    environ: dict[str, str]

    def docker(self, *words: str) -> str:
        done = subprocess.run(
            ["docker", *words], env=self.environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def check_nothing_is_left(self) -> None:
        """No container runs, and those that ran are removed, which takes a slow disk a moment."""
        assert self.docker("ps", "--quiet") == ""
        wait_until(lambda: self.docker("ps", "--all", "--quiet") == "", "the removal")

    def submit(self, folder: Path, *words: str) -> "subprocess.Popen[str]":
        """``ddp-slurm submit`` in the folder, with what the image lacks mounted."""
        (folder / "cluster.yaml").write_text(CLUSTER)
        options = ["--backend", "torchrun", "--container", f"docker:{IMAGE}"]
        options += ["--python", sys.executable, "--env", f"PYTHONPATH={ROOT}"]
        for place in _python_folders():
            options += ["--mount", f"{place}:{place}:ro"]
        return subprocess.Popen(
            [sys.executable, "-m", "ddp_slurm.submit", *options, "--", *words],
            cwd=folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, folder: Path, *words: str) -> tuple[int, str]:
        """The exit status and the output of ``submit``."""
        process = self.submit(folder, *words)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output


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


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    for program in ("dockerd", "docker", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("engine")
    socket = folder / "sock"
    # Without networks of its own: containers use the host's.
    words = ["--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs"]
    words += [f"--data-root={folder}/data", f"--exec-root={folder}/exec"]
    words += [f"--pidfile={folder}/pid", f"--host=unix://{socket}"]
    with (folder / "log").open("w") as log:
        daemon = subprocess.Popen(["dockerd", *words], stdout=log, stderr=log)
    try:
        wait_until(lambda: "API listen" in (folder / "log").read_text(), (folder / "log").read_text)
        engine = Engine({**os.environ, "DOCKER_HOST": f"unix://{socket}"})
        _make_image(engine, folder / "root")
        yield engine
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)
        # dockerd leaves a mount behind, with which the folder could not be removed.
        subprocess.run(["umount", f"{folder}/exec/netns/default"], check=False)


def _make_image(engine: Engine, root: Path) -> None:
    release = Path("/etc/os-release").read_text()
    codename = release.partition("VERSION_CODENAME=")[2].split()[0]
    bootstrap = ["debootstrap", "--variant=minbase", "--include=python3", codename, str(root)]
    subprocess.run(bootstrap, check=True, stdout=subprocess.DEVNULL, timeout=900)
    archive = root.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
    engine.docker("import", str(archive), IMAGE)


def test_two_hosts_train_to_the_end_and_resume(engine: Engine, tmp_path: Path) -> None:
    shutil.copy(TRAIN, tmp_path)
    words = ["python", "train.py"]
    status, output = engine.run(tmp_path, *words, "1", "1")
    assert status == 0, output
    assert "finished: step 16" in output
    assert (tmp_path / "snapshot.pt").stat().st_uid == os.getuid()
    status, output = engine.run(tmp_path, *words, "2", "1")
    assert status == 0, output
    assert "finished: step 32" in output
    assert "epoch 1/2" not in output  # the first one is in the snapshot
    engine.check_nothing_is_left()


def test_a_rank_that_dies_ends_both_containers(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '2':\n    sys.exit(3)\ntime.sleep(300)\n"
    )
    status, output = engine.run(tmp_path, "python", "dies.py")
    assert status != 0, output
    assert "exitcode  : 3" in output
    assert "torchrun on two exited with" in output
    engine.check_nothing_is_left()


def test_ctrl_c_leaves_no_container(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, time\nopen(os.environ['RANK'], 'w').close()\ntime.sleep(300)\n"
    )
    job = engine.submit(tmp_path, "python", "waits.py")
    wait_until(lambda: all((tmp_path / rank).exists() for rank in "012"), "the ranks", seconds=300)
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 130, output
    engine.check_nothing_is_left()
