"""status, logs, cancel and --follow, with stubs for Slurm's clients."""

import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.log_path import RUNS_FOLDER
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import make_plan
from ddp_slurm.runs import commands as jobs
from ddp_slurm.runs.commands import Job, JobError, follow, process_start, status_text
from ddp_slurm.runs.run_folder import Run, RunError, keep_run
from ddp_slurm.slurm_client.states import ComponentState, JobState, Patience, StateError

from ..processes import running
from .conftest import Command, Stub

FAILED = JobState(
    "48",
    "FAILED",
    "scontrol",
    tuple(
        ComponentState(f"48+{i}", "FAILED", node, "NonZeroExitCode", 3, 0, 1)
        for i, node in enumerate(("gamma", "beta", "alpha"))
    ),
)


@pytest.fixture
def run(uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A kept Slurm job 48, with its log."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(Cluster.load(uneven), JobOptions(command=("python", "train.py")))
    kept = keep_run(
        plan,
        runs=tmp_path / RUNS_FOLDER,
        job_id="48",
        backend="sbatch",
        script="",
        cluster_file=uneven,
        submitted_at=0,
    )
    assert kept is not None
    (tmp_path / "lab-48.out").write_text("0: a\n4: b\nsrun: error: x\n4: c\n")
    return kept


def cli(*args: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, **({"PATH": str(path)} if path else {})}
    return subprocess.run(
        [sys.executable, "-m", "ddp_slurm.cli", *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_status_of_each_component(run: Run) -> None:
    text = status_text(Job("48", run), FAILED)
    assert [line.split() for line in text.splitlines()[:4]] == [
        ["JOB", "STATE", "NODES", "REASON", "EXIT", "RESTARTS"],
        ["48+0", "FAILED", "gamma", "NonZeroExitCode", "3", "1"],
        ["48+1", "FAILED", "beta", "NonZeroExitCode", "3", "1"],
        ["48+2", "FAILED", "alpha", "NonZeroExitCode", "3", "1"],
    ]
    assert "job 48 is FAILED (exit status 3, NonZeroExitCode), says scontrol\n" in text
    assert (
        f"repeat it: cd {run.directory} && ddp-slurm submit --backend sbatch --cluster {run.folder}/cluster.yaml"
        in text
    )


def test_a_month_later_there_is_no_slurm(run: Run, tmp_path: Path) -> None:
    (run.folder / "exit").write_text("status=3\nterminated=no\nrestarts=2\n")
    values = json.loads(cli("status", "48", "--json", path=tmp_path).stdout)
    assert (values["state"], values["source"], values["exit_status"]) == (
        "FAILED",
        "exit marker",
        3,
    )
    assert values["components"][0]["restarts"] == 2
    assert values["run_folder"] == str(run.folder)
    assert cli("logs", "48", "--rank", "4", path=tmp_path).stdout == "4: b\n4: c\n"


def test_logs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.logs("48")
    assert capsys.readouterr().out == "0: a\n4: b\nsrun: error: x\n4: c\n"
    with pytest.raises(JobError, match="--rank 7: job 48 has the ranks 0 to 6"):
        jobs.logs("48", rank=7)
    (run.folder / "plan.json").write_text("{}")
    with pytest.raises(RunError, match=r"48/plan\.json: not the plan of a run"):
        jobs.logs("48", rank=1)


def test_a_log_that_cannot_be_read_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lab-48.out").unlink()
    (tmp_path / "lab-48.out").mkdir()
    done = cli("logs", "48", path=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/lab-48.out: Is a directory\n")


def test_ids_that_are_none(run: Run, tmp_path: Path, stub: Stub) -> None:
    stub("squeue", "exit 0")
    stub("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    stub("sacct", "exit 1")
    for bad in ("x", "48; rm -rf /", "../48", "-1", "48_1", ""):
        with pytest.raises(JobError, match="is not a job id, such as 48"):
            Job.find(bad)
    with pytest.raises(JobError, match="no run 'local-20260101T000000-1' under this folder"):
        Job.find("local-20260101T000000-1")
    with pytest.raises(JobError, match=r"job 49: Slurm does not know it \(.*Invalid job id"):
        Job.find("49")
    assert Job.find("48+2").id == "48"


def test_slurm_tells_which_run_of_a_number_it_is(run: Run, tmp_path: Path, stub: Stub) -> None:
    other = tmp_path / "a" / RUNS_FOLDER / "48"
    shutil.copytree(run.folder, other)
    (other / "run.json").write_text(
        (run.folder / "run.json").read_text().replace("lab-48.out", "a/lab-48.out")
    )
    told = (Path(__file__).parent / "job_states/24.11/failed.scontrol").read_text()
    for folder in (run.folder, other):
        log = folder.parent.parent / "lab-48.out"
        stub("scontrol", f"cat <<'END'\n{re.sub('StdOut=.*', f'StdOut={log}', told)}END")
        found = Job.find("48").run
        assert found is not None
        assert found.folder == folder


def test_cancel_gives_slurms_words(run: Run, tmp_path: Path, stub: Stub) -> None:
    stub("squeue", "echo '48+0|RUNNING|gamma|None'")
    stub("scontrol", "exit 1")
    stub("scancel", f'echo "$@" > {tmp_path}/asked')
    jobs.cancel("48+1")
    assert (
        tmp_path / "asked"
    ).read_text() == "48\n"  # the first component's id: it takes all along
    stub(
        "scancel",
        "echo 'scancel: error: Kill job error on job id 48: Access/permission denied' >&2; exit 1",
    )
    with pytest.raises(JobError, match="Access/permission denied"):
        jobs.cancel("48")
    stub("squeue", "exit 1")
    (run.folder / "exit").write_text("status=0\n")
    with pytest.raises(JobError, match=r"job 48 does not run: it is COMPLETED"):
        jobs.cancel("48")


class Script(Job):
    """A job that goes through given states, each with a step that happens while it lasts."""

    def __init__(self, run: Run, *steps: object) -> None:
        super().__init__(run.job_id, run)
        object.__setattr__(self, "steps", list(steps))

    def state(self) -> JobState:
        steps: list[tuple[JobState, str]] = self.steps  # type: ignore[attr-defined]
        state, text = steps[0] if len(steps) == 1 else steps.pop(0)
        if text:
            with open(str(self.run and self.run.log), "a") as log:
                log.write(text)
        return state


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "LOG_SECONDS", 0.0)


def pending(reason: str) -> JobState:
    return JobState("48", "PENDING", "squeue", (ComponentState("48+0", "PENDING", "", reason),))


RUNNING = JobState("48", "RUNNING", "squeue", (ComponentState("48+0", "RUNNING", "gamma"),))


def test_follow_tells_the_state_then_the_log(
    run: Run, at_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(str(run.log)).unlink()
    out = io.StringIO()
    job = Script(
        run,
        (pending("Priority"), ""),
        (pending("Priority"), ""),
        (pending("Resources"), ""),
        (RUNNING, ""),
        (RUNNING, "0: one\n0: tw"),
        (pending("BeginTime"), "o\n"),
        (RUNNING, "0: three\n"),
        (FAILED, "last"),
    )
    assert follow(job, out) == 3
    assert out.getvalue() == "0: one\n0: two\n0: three\nlast\n"
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "job 48 is PENDING (Priority)",
        "job 48 is PENDING (Resources)",
        "job 48 is RUNNING",
        "job 48 is PENDING (BeginTime)",
        "job 48 is RUNNING",
        "job 48 is FAILED (exit status 3, NonZeroExitCode)",
    ]


@pytest.mark.parametrize(
    ("state", "status"),
    [("COMPLETED", 0), ("FAILED", 1), ("TIMEOUT", 1), ("NODE_FAIL", 1)],
)
def test_follow_gives_an_exit_status(run: Run, at_once: None, state: str, status: int) -> None:
    assert follow(Script(run, (JobState("48", state, "scontrol"), "")), io.StringIO()) == status


def test_ctrl_c_detaches(
    run: Run, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ctrl_c(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", ctrl_c)
    assert follow(Script(run, (RUNNING, "")), io.StringIO()) == 130
    said = capsys.readouterr().err
    assert "detached; job 48 goes on. Come back: ddp-slurm logs 48 --follow" in said


def test_follow_does_not_wait_for_ever(
    run: Run, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "Patience", lambda: Patience(limit_seconds=-1))
    with pytest.raises(StateError, match="Slurm has not answered"):
        follow(Script(run, (JobState("48", "UNKNOWN", "nobody", note="down"), "")), io.StringIO())


def test_local_runs_are_kept_like_those_of_slurm(
    uneven: Path, submit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, sys; r = os.environ['SLURM_PROCID']; print('hello', r); sys.exit(3 * (r == '2'))"
    )
    done = submit("--backend", "local", "--gpus", "3", "--", "rank.py")
    assert done.returncode == 3
    (folder,) = (tmp_path / RUNS_FOLDER).iterdir()
    assert f"run {folder.name}, kept in {RUNS_FOLDER}/{folder.name}" in done.stderr
    monkeypatch.chdir(tmp_path)
    job = Job.find(folder.name)
    state = job.state()
    assert (state.state, state.exit_status, state.source) == ("FAILED", 3, "exit marker")
    log = (folder / "log").read_text()
    assert set(done.stdout.splitlines()) <= set(log.splitlines())
    assert "[2 beta] rank 2 on beta exited with 3" in log
    assert "hello" not in done.stderr
    with pytest.raises(JobError, match="does not run: it is FAILED"):
        jobs.cancel(folder.name)


def refused(pidfd: int, number: int) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_local_run_that_goes_on_and_is_cancelled(
    uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stay.py").write_text("import signal; print('up', flush=True); signal.pause()")
    monkeypatch.chdir(tmp_path)
    command = [
        sys.executable,
        "-m",
        "ddp_slurm.submit",
        "--backend",
        "local",
        "--gpus",
        "1",
        "--output",
        "logs/%j.out",
        "--",
        "stay.py",
    ]
    with running(command, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None
        assert "up" in launcher.stdout.readline()
        (folder,) = (tmp_path / "logs" / RUNS_FOLDER).iterdir()
        job = Job.find(folder.name)
        assert job.state().state == "RUNNING"
        assert (tmp_path / f"logs/{folder.name}.out").read_text() == "[0 gamma] up\n"
        with monkeypatch.context() as another_user:
            another_user.setattr(signal, "pidfd_send_signal", refused)
            with pytest.raises(JobError, match="its launcher is another user's process"):
                jobs.cancel(folder.name)
        jobs.cancel(folder.name)
        assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    assert (job.state().state, job.state().exit_status) == ("CANCELLED", 143)


def local_run(run: Run, **process: object) -> Run:
    return Run(
        **{**vars(run), "job_id": "local-20260101T000000-1", "backend": "local", "process": process}
    )  # type: ignore[arg-type]


def test_a_launcher_that_is_gone(run: Run) -> None:
    me, here = os.getpid(), socket.gethostname()
    begun = process_start(me)
    assert begun
    assert (
        jobs.foreground_state(local_run(run, host=here, pid=me, started=begun)).state == "RUNNING"
    )
    # the pid belongs to another process now
    gone = jobs.foreground_state(local_run(run, host=here, pid=me, started=begun - 1))
    assert gone.state == "FAILED"
    assert "left no exit marker" in gone.describe()
    elsewhere = jobs.foreground_state(local_run(run, host="elsewhere", pid=me, started=begun))
    assert elsewhere.describe() == "UNKNOWN (it was started on elsewhere: ask there)"
    assert process_start(0) is None
