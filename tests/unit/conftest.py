"""Shared by the tests that need neither Slurm nor a network."""

import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch
from tests.clusters import UNEVEN
from tests.waiting import wait_until

from .fake_slurm import (
    RUNNING,
    SCANCEL,
    SCONTROL,
    SQUEUE,
    FakeSlurm,
    MakeScript,
    Script,
    node_record,
)
from .other_user import Other
from .recording import Stubs


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
        if name == "srun":  # the step that watches the first component is not the ranks'
            text = f'case " $* " in *" --overlap "* | *" --version "*) exit ;; esac\n{text}'
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return make


@pytest.fixture
def slurm(tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A job 7 of three running components, and a Slurm that accepts everything."""
    fake = FakeSlurm(tmp_path / "slurm")
    fake.folder.mkdir()
    fake.set(
        components=RUNNING, steps="", answers="", calls="", nodes=node_record("2026-01-01T00:00:00")
    )
    monkeypatch.setenv("FAKE_SLURM", str(fake.folder))
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        stub(name, text)
    stub("sleep", "exec /bin/sleep 0.05")
    return fake


@pytest.fixture
def script(tmp_path: Path, uneven: Path) -> MakeScript:
    """``script(**options)``: the job script of a plan of 1, 2 and 4 ranks."""

    def make(**options: object) -> Script:
        command = {"command": ["python", "train.py", "5", "1"]}
        plan = make_plan(Cluster.load(uneven), JobOptions.read({**command, **options}))
        return Script(render_sbatch(plan, tmp_path / "runs"), tmp_path)

    return make


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


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


@pytest.fixture(scope="module")
def second_user() -> Iterator[tuple[str, int, int]]:
    """Name, uid and gid of a new user."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a second user")
    for user in pwd.getpwall():
        run = re.fullmatch("ddptest([0-9]+)", user.pw_name)
        if run and not Path(f"/proc/{run[1]}").exists():  # of a test run that was killed
            subprocess.run(["userdel", user.pw_name], capture_output=True)
    name = f"ddptest{os.getpid()}"
    add = ["useradd", "--no-create-home", "--user-group", "--shell", "/bin/sh", name]
    # Another test run may hold the lock of /etc/passwd.
    wait_until(lambda: subprocess.run(add, capture_output=True).returncode == 0, add)
    try:
        numbers = (subprocess.check_output(["id", kind, name]) for kind in ("-u", "-g"))
        uid, gid = map(int, numbers)
        yield name, uid, gid
    finally:
        remove = ["userdel", name]
        wait_until(lambda: subprocess.run(remove, capture_output=True).returncode == 0, remove)


@pytest.fixture
def other(second_user: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Other]:
    """The second user, and a folder of both, which is the current one."""
    # Not tmp_path, which others cannot enter; no sticky bit, as in the folder of a project.
    shared = Path(tempfile.mkdtemp(prefix="ddp_slurm_shared."))
    shared.chmod(0o777)
    monkeypatch.chdir(shared)
    umask = os.umask(0o022)
    try:
        yield Other(*second_user, shared)
    finally:
        os.umask(umask)
        shutil.rmtree(shared)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of the user under attack."""
    path = tmp_path / "thesis.tex"
    path.write_text("years of work")
    return path
