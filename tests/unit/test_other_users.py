"""What another user of the machine cannot do: with a real second user, so only as root."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.console import say, show, table
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.runs_folder import RUNS_FOLDER, runs_folder_in
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch
from ddp_slurm.runs import commands as jobs
from ddp_slurm.runs.process import process_start
from ddp_slurm.runs.run_folder import JobError, find_runs

from .conftest import Command, Stub
from .fake_slurm import FakeSlurm, Script
from .other_user import Other

LOCAL_ID = "local-20260131T235900-4711"
ESCAPES = "\x1b]0;a title\x07\x1b[2Jred"


def record(**values: object) -> str:
    run = {
        "job_id": "48",
        "backend": "sbatch",
        "directory": "/",
        "log": None,
        "submitted": "2026-01-31T23:59:00Z",
        "command": ["true"],
        "repeat": [],
        "process": None,
    }
    return json.dumps({**run, **values})


def slurm_has_ended(stub: Stub, log: str = "/dev/null") -> None:
    stub("scontrol", f"echo 'JobId=48 JobState=COMPLETED ExitCode=0:0 StdOut={log}'")


def test_status_writes_through_no_planted_link(
    other: Other, mine: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_has_ended(stub)
    other.plant(f"{RUNS_FOLDER}/48/run.json", record(command=["id"]))
    other.run(f"ln -s {mine} {RUNS_FOLDER}/48/state.json")
    jobs.status("48")
    out, err = capsys.readouterr()
    assert mine.read_text() == "years of work"
    assert "job 48 is COMPLETED" in out
    assert (
        f"not used: {other.shared}/{RUNS_FOLDER}/48: belongs to another user, {other.name}" in err
    )


@pytest.mark.parametrize("plant", ["folder", "link"])
def test_submit_writes_through_no_planted_link(
    plant: str, other: Other, mine: Path, uneven: Path, submit: Command, stub: Stub
) -> None:
    stub("sbatch", "cat >/dev/null; echo 48")
    if plant == "folder":
        other.run(f"mkdir -p {RUNS_FOLDER}/48; ln -s {mine} {RUNS_FOLDER}/48/script.sh")
    else:
        other.run(f"ln -s {mine.parent} {RUNS_FOLDER}")
    before = sorted(mine.parent.iterdir())
    done = submit("--cluster", str(uneven), "--", "python", "t.py", cwd=other.shared)
    assert done.returncode == 0, done.stderr
    assert mine.read_text() == "years of work"
    assert sorted(mine.parent.iterdir()) == before
    assert (other.shared / f"{RUNS_FOLDER}.0/48/script.sh").read_text().startswith("#!")
    assert [run.job_id for run in find_runs("48")] == ["48"]


def test_submit_refuses_a_folder_of_another_user(
    other: Other, uneven: Path, submit: Command, stub: Stub
) -> None:
    stub("sbatch", "cat >/dev/null; echo 48; : >submitted")
    other.run(f"mkdir {RUNS_FOLDER} {RUNS_FOLDER}.0")
    done = submit("--cluster", str(uneven), "--", "python", "t.py", cwd=other.shared)
    assert done.returncode == 2
    assert f"{RUNS_FOLDER}.0: belongs to another user, {other.name}" in done.stderr
    assert not (other.shared / "submitted").exists()


@pytest.mark.parametrize(
    "plant", ["mkdir -p {runs}/7 && ln -s {file} {runs}/7/.exit", "ln -s {folder} {runs}"]
)
def test_job_script_writes_through_no_planted_link(
    plant: str, other: Other, mine: Path, uneven: Path, stub: Stub, slurm: FakeSlurm, tmp_path: Path
) -> None:
    stub("srun", "exit 0")
    runs = runs_folder_in(other.shared)
    plan = make_plan(Cluster.load(uneven), JobOptions.read({"command": ["python", "t.py"]}))
    other.run(plant.format(runs=runs, file=mine, folder=mine.parent))
    job = Script(render_sbatch(plan, runs), tmp_path)
    assert job.run() == 0
    assert mine.read_text() == "years of work"
    assert not (mine.parent / "7").exists()
    assert f"job script: {runs} is not used: it is a link, or belongs to another user" in job.log


def test_local_run_logs_through_no_planted_link(
    other: Other, mine: Path, uneven: Path, submit: Command
) -> None:
    other.run(f"ln -s {mine} log.out")
    options = ["--backend", "local", "--gpus", "1", "--output", "log.out"]
    done = submit("--cluster", str(uneven), *options, "--", "true", cwd=other.shared)
    assert done.returncode == 2
    assert f"it is a link of another user, {other.name}" in done.stderr
    assert mine.read_text() == "years of work"


def test_cancel_ends_no_process_that_another_user_named(
    other: Other, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as editor:
        try:
            process = {
                "host": os.uname().nodename,
                "pid": editor.pid,
                "started": process_start(editor.pid),
            }
            planted = record(job_id=LOCAL_ID, backend="local", process=process)
            other.plant(f"{RUNS_FOLDER}/{LOCAL_ID}/run.json", planted)
            with pytest.raises(JobError, match=f"no run '{LOCAL_ID}' under this folder"):
                jobs.cancel(LOCAL_ID)
            time.sleep(0.1)
            assert editor.poll() is None
        finally:
            editor.kill()
    assert "belongs to another user" in capsys.readouterr().err


def test_logs_of_another_user_change_no_screen(
    other: Other, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    log = other.plant("48.out", f"{ESCAPES}\ttab")
    slurm_has_ended(stub, f"{log}")
    jobs.logs("48")
    assert capsys.readouterr().out == "\\x1b]0;a title\\x07\\x1b[2Jred\ttab\n"
    own = other.shared / "own.out"
    own.write_text(f"{ESCAPES}\r 10%\n")
    slurm_has_ended(stub, f"{own}")
    jobs.logs("48")
    assert capsys.readouterr().out == f"{ESCAPES}\r 10%\n"


def test_state_and_messages_change_no_screen(
    other: Other, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_has_ended(stub, f"/tmp/{ESCAPES}.out")
    jobs.status("48")
    with pytest.raises(JobError):
        jobs.cancel("48")
    say(f"error: {ESCAPES}")
    lines = table([(ESCAPES, "two\nlines")])
    assert "\x1b" not in lines
    show(lines)
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "error: \\x1b]0;a title\\x07" in err
    assert out.endswith("red  two\\nlines\n")
    assert "/tmp/\\x1b]0;a title" in out


def test_each_user_has_runs_of_his_own_in_a_shared_folder(other: Other) -> None:
    assert runs_folder_in(other.shared).name == RUNS_FOLDER
    (other.shared / RUNS_FOLDER).mkdir(mode=0o755)
    assert runs_folder_in(other.shared).name == RUNS_FOLDER
    os.seteuid(other.uid)
    try:
        assert runs_folder_in(other.shared).name == f"{RUNS_FOLDER}.{other.uid}"
    finally:
        os.seteuid(0)
    (other.shared / RUNS_FOLDER).chmod(0o777)
    assert runs_folder_in(other.shared).name == f"{RUNS_FOLDER}.0"


def test_own_link_to_the_folder_of_the_runs_is_followed(other: Other, tmp_path: Path) -> None:
    (other.shared / RUNS_FOLDER).symlink_to(tmp_path)
    assert runs_folder_in(other.shared) == tmp_path
