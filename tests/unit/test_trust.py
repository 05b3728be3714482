"""Files, secrets and locks that another user of the machine can reach: a real one, as root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm import trust
from ddp_slurm.backends.submitit.executor import CommandJob
from ddp_slurm.backends.submitit.job import _load_outcome
from ddp_slurm.cluster import Cluster
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import write_own, write_whole
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.runs_folder import runs_folder_in
from ddp_slurm.lab import registry
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch
from tests.waiting import wait_until

from .conftest import Command, Stub
from .fake_slurm import FakeSlurm, Script
from .other_user import Other

VALUE = "value-for-one-node"


@pytest.mark.parametrize(
    ("mode", "group", "error"),
    [
        (0o755, "root", ""),
        (0o775, "root", ""),  # the user's own group
        (0o775, "other", "other users can write to it .mode 0775.; .* chmod -R go-w"),
        (0o777, "root", "other users can write to it"),
    ],
)
def test_folder_is_read_if_nobody_else_can_write(
    mode: int, group: str, error: str, other: Other
) -> None:
    folder = other.shared / "48"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    os.chown(folder, 0, 0 if group == "root" else other.gid)
    folder.chmod(mode)
    if not error:
        assert trust.read_text(folder / "run.json") == "{}"
        write_own(folder / "state.json", "[]")
        return
    for use in (trust.read_text, lambda path: write_own(path, "[]")):
        with pytest.raises(trust.TrustError, match=error):
            use(folder / "run.json")
    trust.make_folder(folder)  # its parent is trusted where this is used
    assert trust.read_text(folder / "run.json") == "{}"


def test_files_of_roots_are_believed_and_links_are_not(other: Other, mine: Path) -> None:
    folder = other.shared / "48"
    folder.mkdir()
    (folder / "run.json").symlink_to(mine)
    with pytest.raises(trust.TrustError, match="is a link"):
        trust.read_text(folder / "run.json")
    (folder / "plan.json").write_text("{}")
    os.seteuid(other.uid)
    try:
        assert trust.read_text(folder / "plan.json") == "{}"
    finally:
        os.seteuid(0)
    os.chown(folder / "plan.json", other.uid, other.gid)
    with pytest.raises(trust.TrustError, match=f"belongs to another user, {other.name}"):
        trust.read_text(folder / "plan.json")


def test_write_whole_follows_own_links_only(other: Other, mine: Path) -> None:
    other.run(f"ln -s {mine} theirs")
    with pytest.raises(DdpSlurmError, match=f"theirs: cannot be written: .*, {other.name}; "):
        write_whole(other.shared / "theirs", "new")
    (other.shared / "ours").symlink_to("theirs")
    with pytest.raises(DdpSlurmError, match=f"ours: cannot be written: .*, {other.name}; "):
        write_whole(other.shared / "ours", "new")
    assert mine.read_text() == "years of work"


def test_result_of_another_user_is_not_unpickled(other: Other) -> None:
    pickle = other.plant("48_0_result.pkl", "cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(trust.TrustError, match=f"belongs to another user, {other.name}"):
        _load_outcome(pickle)
    assert not (other.shared / "ran").exists()


def test_files_of_submitit_are_for_their_user_only(other: Other, uneven: Path, stub: Stub) -> None:
    stub("sbatch", "cat >/dev/null; umask >umask; echo 48")
    options = JobOptions.read({"command": ["t.py"], "env": [f"TOKEN={VALUE}"], "setup": ["true"]})
    plan = make_plan(Cluster.load(uneven), options)
    runs = runs_folder_in(other.shared)
    assert CommandJob(plan, runs, None).submit() == "48"
    assert VALUE in (runs / "48/48_submission.sh").read_text()
    for path in (runs / "48").iterdir():
        other.run(f"cat {path}", status=1)
    assert (other.shared / "umask").read_text() == "0022\n"  # sbatch gives it to the job
    assert os.umask(0o022) == 0o022


def test_env_of_a_node_is_in_no_list_of_processes(
    other: Other, stub: Stub, slurm: FakeSlurm, tmp_path: Path
) -> None:
    wait = 'echo $$ >"$UP"; while [[ -e $UP ]]; do sleep 1; done'
    stub("srun", f'{wait}; while [[ ${{1:-}} == -* ]]; do shift; done; exec "$@"')
    file = tmp_path / "c.yaml"
    file.write_text(f"nodes: [{{name: a, gpus: 1, env: {{TOKEN: {VALUE}}}}}]")
    options = JobOptions.read({"command": ["printenv", "TOKEN"], "env": [f"MORE={VALUE}"]})
    job = Script(render_sbatch(make_plan(Cluster.load(file), options)), tmp_path)
    up = other.shared / "up"
    with job.start(UP=str(up)) as process:
        try:
            wait_until(lambda: up.exists() and up.read_text(), "srun")
            seen = other.run(f"tr '\\0' ' ' </proc/{up.read_text().strip()}/cmdline")
        finally:
            up.unlink(missing_ok=True)
    assert "--ntasks-per-node=1" in seen
    assert VALUE not in seen
    assert process.returncode == 0, job.log
    assert job.log == f"{VALUE}\n"


@pytest.mark.parametrize("option", ["--env", "--setup"])
def test_script_with_values_is_for_its_user_only(
    option: str, uneven: Path, submit: Command, tmp_path: Path
) -> None:
    done = submit(option, "A=x", "--script", "test.sh", "--", "python", "t.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "test.sh").stat().st_mode & 0o777 == 0o700


def test_new_lab_lock_is_for_root_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LOCK_FILE", tmp_path / "lock")
    with registry.locked():
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_lab_lock_cannot_be_held_by_another_user(other: Other) -> None:
    with registry.locked():
        pass
    for path in (registry.LOCK_FILE.parent, registry.LOCK_FILE):
        with other.start(f"flock {path} sh -c 'echo held; read wait'") as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            take = "from ddp_slurm.lab.registry import locked\nwith locked(): pass"
            done = subprocess.run([sys.executable, "-c", take], timeout=20, cwd="/")
            holder.kill()
        assert done.returncode == 0
    assert registry.LOCK_FILE.stat().st_mode & 0o777 == 0o600
