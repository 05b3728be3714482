"""The Dockerfile and compose.yml, built and run in a real engine, without GPUs and a registry."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..waiting import wait_until
from .engine import ROOT, Engine, import_root, job_words, run_job

TRAIN = ROOT / "synthetic_data_example" / "train.py"
IMAGE = "ddp_slurm"
BASE = "ddp-slurm-base"
VENV = "/opt/venv"
PATH = f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin"
NEEDED = ["setuptools>=64", "jinja2", "pyyaml", "numpy", "rich", "aiohttp", "filelock"]
BOXES = {"one": ("0", "1"), "two": ("1", "2")}
"""Each box's node rank and number of ranks."""
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def image(engine: Engine, debian_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Dockerfile's, on a base that has torch, as the default base has, and packages for pip."""
    root = tmp_path_factory.mktemp("base") / "root"
    subprocess.run(["cp", "-a", str(debian_root), str(root)], check=True)
    _install_torch(root)
    import_root(engine, root, f"{BASE}:1", f"ENV PATH={PATH}")
    shutil.rmtree(root)
    words = ["--network", "host", "--build-arg", f"BASE={BASE}:1"]
    words += ["--file", "cluster_setup/Dockerfile", "--tag", IMAGE, str(ROOT)]
    words[words.index("--file") + 1] = str(ROOT / "cluster_setup" / "Dockerfile")
    engine.docker("build", *words)
    return IMAGE


def _install_torch(root: Path) -> None:
    """With this machine's configuration of pip; inside the base, pip asks no index."""
    ask = ["chroot", str(root), "python3", "-c"]
    ask.append("import sys; print('{}.{}'.format(*sys.version_info))")
    version = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(root / "wheels")]
    download += ["--only-binary=:all:", "--python-version", version]
    subprocess.run([*download, *NEEDED, "torch", "torchvision"], check=True, timeout=1200)
    (root / "etc" / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    install = f"python3 -m venv {VENV} && {VENV}/bin/pip install --quiet torch torchvision"
    pip_free = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    subprocess.run(["chroot", str(root), "sh", "-ec", install], check=True, env=pip_free)


def test_image_trains_on_two_hosts(engine: Engine, image: str, tmp_path: Path) -> None:
    shutil.copy(TRAIN, tmp_path)
    words = job_words(f"docker:{image}", mounts_python=False)
    status, output = run_job(engine.environ, tmp_path, words, "python", "train.py", "1", "1")
    assert status == 0, output
    assert "finished: step 16" in output
    engine.check_nothing_is_left()


def test_image_has_what_the_repository_lists(engine: Engine, image: str) -> None:
    found = engine.docker("run", "--rm", "--network=host", image, "ls", "-A", "/opt/ddp_slurm")
    assert {".git", ".venv", "tests"}.isdisjoint(found.split())
    show = "import ddp_slurm, torch; print(torch.__file__, ddp_slurm.__file__)"
    found = engine.docker("run", "--rm", "--network=host", image, "python", "-c", show)
    assert found.count(f"{VENV}/lib/") == 2


class Boxes:
    """compose.yml, started on each box as its comment says; both are this machine."""

    def __init__(self, engine: Engine, folder: Path, verb: list[str], command: str) -> None:
        self.engine = engine
        self.runs: list[subprocess.Popen[str]] = []
        shutil.copy(TRAIN, folder)
        for box, (node_rank, gpus) in BOXES.items():
            variables = {"NODE_RANK": node_rank, "GPUS": gpus, "COMMAND": command}
            variables |= {"MASTER_ADDR": "127.0.0.1", "RUN_AS": "0:0", "PWD": str(folder)}
            words = ["docker", "compose", "-f", str(ROOT / "cluster_setup" / "compose.yml")]
            run = subprocess.Popen(
                [*words, "--project-name", box, *verb],
                cwd=folder,
                env={**engine.environ, **variables},
                stdout=(folder / f"{box}.log").open("w"),
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.runs.append(run)
        self.log = folder / "one.log"

    def statuses(self) -> list[int]:
        return [run.wait(timeout=300) for run in self.runs]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.log.read_text(), self.log.read_text, seconds=300)

    def container(self, box: str) -> str:
        (name,) = [name for name in self.engine.containers() if name.startswith(box)]
        return name


@contextmanager
def compose(engine: Engine, folder: Path, command: str, service: str = "cpu") -> Iterator[Boxes]:
    done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("docker has no plug-in named compose")
    boxes = Boxes(engine, folder, ["run", "--rm", service], command)
    try:
        yield boxes
    finally:
        for run in boxes.runs:
            run.kill()
            run.wait()
        for name in engine.containers():
            engine.docker("rm", "--force", name)


def test_compose_trains_to_the_end(engine: Engine, image: str, tmp_path: Path) -> None:
    with compose(engine, tmp_path, "train.py 1 1") as boxes:
        assert boxes.statuses() == [0, 0], boxes.log.read_text()
        assert "finished: step 16" in boxes.log.read_text()
        engine.check_nothing_is_left()


def test_compose_sigusr2_on_one_box_saves_and_stops(
    engine: Engine, image: str, tmp_path: Path
) -> None:
    with compose(engine, tmp_path, "train.py 100000 100000") as boxes:
        boxes.wait_for("epoch 2/")
        engine.docker("kill", "--signal", "USR2", boxes.container("two"))
        assert boxes.statuses() == [0, 0], boxes.log.read_text()
        assert "with a snapshot to resume from" in boxes.log.read_text()
        assert (tmp_path / "snapshot.pt").exists()
        engine.check_nothing_is_left()


def test_compose_sigterm_ends_both_boxes(engine: Engine, image: str, tmp_path: Path) -> None:
    with compose(engine, tmp_path, "train.py 100000 1") as boxes:
        boxes.wait_for("epoch 3/")
        engine.docker("kill", "--signal", signal.SIGTERM.name, boxes.container("two"))
        assert all(boxes.statuses())
        assert (tmp_path / "snapshot.pt").exists()  # of an epoch
        engine.check_nothing_is_left()


def test_compose_names_what_a_box_without_gpus_lacks(
    engine: Engine, image: str, tmp_path: Path
) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has GPUs")
    with compose(engine, tmp_path, "train.py 1 1", service="train") as boxes:
        assert all(boxes.statuses())
        assert 'could not select device driver "nvidia"' in boxes.log.read_text()
