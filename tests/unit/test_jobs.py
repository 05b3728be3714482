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
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.runs_folder import RUNS_FOLDER
from ddp_slurm.plan import make_plan
from ddp_slurm.runs import commands as jobs
from ddp_slurm.runs import follow as following
from ddp_slurm.runs import process
from ddp_slurm.runs.commands import status_text
from ddp_slurm.runs.follow import follow
from ddp_slurm.runs.job import Job, find_job
from ddp_slurm.runs.keep import Submission, keep_run
from ddp_slurm.runs.run_folder import JobError, Run, RunError
from ddp_slurm.slurm_client import sources
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
    kept = keep_run(Submission(plan, "sbatch", "", 0, uneven), tmp_path / RUNS_FOLDER, "48")
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


def test_status_lists_each_component(run: Run) -> None:
    text = status_text(Job("48", run), FAILED)
    assert [line.split() for line in text.splitlines()[:4]] == [
        ["JOB", "STATE", "NODES", "REASON", "EXIT", "RESTARTS"],
        ["48+0", "FAILED", "gamma", "NonZeroExitCode", "3", "1"],
        ["48+1", "FAILED", "beta", "NonZeroExitCode", "3", "1"],
        ["48+2", "FAILED", "alpha", "NonZeroExitCode", "3", "1"],
    ]
    assert "job 48 is FAILED (exit status 3, NonZeroExitCode) (source: scontrol)\n" in text
    assert (
        f"repeat it: cd {run.directory} && ddp-slurm submit --backend sbatch "
        f"--cluster {run.folder}/cluster.yaml" in text
    )


def test_run_folder_knows_without_slurm(run: Run, tmp_path: Path) -> None:
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


def test_status_of_a_python_function_repeats_nothing(run: Run, tmp_path: Path) -> None:
    record = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps({**record, "command": [], "repeat": []}))
    (run.folder / "exit").write_text("status=0\n")
    assert json.loads(cli("status", "48", "--json", path=tmp_path).stdout)["repeat"] == ""
    assert "repeat it" not in cli("status", "48", path=tmp_path).stdout


def test_status_without_a_shared_folder(run: Run, tmp_path: Path, stub: Stub) -> None:
    """Slurm has forgotten the job, and log and exit marker are on gamma, the host of rank 0."""
    (tmp_path / "lab-48.out").unlink()
    stub("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    stub("sacct", "exit 1")
    marker = f"{run.folder}/exit"
    stub("ssh", f'[[ "${{*: -2}}" == "gamma cat {marker}" ]] && echo status=3 && echo restarts=1')
    job, state = find_job("48", tmp_path)
    text = status_text(job, state)
    assert "job 48 is FAILED (exit status 3) (source: exit marker)" in text
    assert f"log: gamma:{tmp_path}/lab-48.out" in text
    stub("ssh", "exit 255")
    assert find_job("48", tmp_path)[1].state == "ENDED"


def test_logs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.logs("48")
    assert capsys.readouterr().out == "0: a\n4: b\nsrun: error: x\n4: c\n"
    with pytest.raises(JobError, match="--rank 7: job 48 has the ranks 0 to 6"):
        jobs.logs("48", rank=7)
    (run.folder / "plan.json").write_text("{}")
    with pytest.raises(RunError, match=r"48/plan\.json: not the plan of a run"):
        jobs.logs("48", rank=1)


@pytest.mark.parametrize(("command", "seconds"), [(jobs.logs, 5), (jobs.status, 90)])
def test_logs_need_no_answer_of_slurm(
    command: Callable[[str], None],
    seconds: float,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job has not ended, and slurmctld does not respond."""
    limits = {}

    def no_answer(argv: Sequence[str], *, timeout_seconds: float = 90) -> Answer:
        limits[argv[0]] = timeout_seconds
        return Answer(124, "", "no answer")

    monkeypatch.setattr(sources, "ask_slurm", no_answer)
    command("48")
    assert limits["scontrol"] == seconds


def test_logs_names_a_log_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lab-48.out").unlink()
    (tmp_path / "lab-48.out").mkdir()
    done = cli("logs", "48", path=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/lab-48.out: Is a directory\n")


def test_find_job_refuses_what_is_no_job(run: Run, tmp_path: Path, stub: Stub) -> None:
    stub("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    stub("sacct", "exit 1")
    for bad in ("x", "48; rm -rf /", "../48", "-1", "48_1", ""):
        with pytest.raises(JobError, match="is not a job id, such as 48"):
            find_job(bad)
    with pytest.raises(JobError, match="no run 'local-20260101T000000-1' under this folder"):
        find_job("local-20260101T000000-1")
    with pytest.raises(JobError, match=r"job 49: Slurm does not know it \(.*Invalid job id"):
        find_job("49")
    assert find_job("48+2")[0].id == "48"


def test_find_job_takes_the_run_of_slurms_log(run: Run, tmp_path: Path, stub: Stub) -> None:
    other = tmp_path / "a" / RUNS_FOLDER / "48"
    shutil.copytree(run.folder, other)
    (other / "run.json").write_text(
        (run.folder / "run.json").read_text().replace("lab-48.out", "a/lab-48.out")
    )
    record = (Path(__file__).parent / "job_states/24.11/failed.scontrol").read_text()
    record = record.replace("HetJobId=7", "HetJobId=48")
    for folder in (run.folder, other):
        log = folder.parent.parent / "lab-48.out"
        stub("scontrol", f"cat <<'END'\n{re.sub('   StdOut=.*', f'   StdOut={log}', record)}END")
        job, _ = find_job("48")
        assert job.run is not None
        assert job.run.folder == folder


def test_cancel_passes_on_the_error_of_scancel(run: Run, tmp_path: Path, stub: Stub) -> None:
    record = "JobId=48 HetJobId=48 HetJobOffset=0 JobName=x\n   JobState=RUNNING Reason=None"
    stub("scontrol", f"echo '{record}'")
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
    stub("scontrol", "exit 1")
    (run.folder / "exit").write_text("status=0\n")
    with pytest.raises(JobError, match="job 48 is not running; its state is COMPLETED"):
        jobs.cancel("48")


class Script:
    """A job that goes through given states, each with text that it writes into its log then."""

    is_of_slurm = False

    def __init__(self, run: Run, *steps: tuple[JobState, str]) -> None:
        self.id = run.job_id
        self.path = Path(str(run.log))
        self.steps = list(steps)

    def state(self) -> JobState:
        state, text = self.steps[0] if len(self.steps) == 1 else self.steps.pop(0)
        if text:
            with self.path.open("a") as log:
                log.write(text)
        return state

    def log(self, state: JobState) -> Path:
        return self.path


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(following, "LOG_SECONDS", 0.0)


def pending(reason: str) -> JobState:
    return JobState("48", "PENDING", "squeue", (ComponentState("48+0", "PENDING", "", reason),))


RUNNING = JobState("48", "RUNNING", "squeue", (ComponentState("48+0", "RUNNING", "gamma"),))


def test_follow_reports_the_state_then_the_log(
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
    reported = capsys.readouterr().err.splitlines()
    assert reported == [
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
def test_follow_returns_an_exit_status(run: Run, at_once: None, state: str, status: int) -> None:
    assert follow(Script(run, (JobState("48", state, "scontrol"), "")), io.StringIO()) == status


def test_follow_detaches_on_ctrl_c(
    run: Run, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ctrl_c(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", ctrl_c)
    assert follow(Script(run, (RUNNING, "")), io.StringIO()) == 130
    reported = capsys.readouterr().err
    assert "detached; job 48 goes on. Come back: ddp-slurm logs 48 --follow" in reported


def test_follow_ends_when_slurm_stays_silent(
    run: Run, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = count(step=1000.0)
    monkeypatch.setattr(following, "Patience", lambda: Patience(clock=lambda: next(now)))
    with pytest.raises(StateError, match="Slurm has not responded"):
        follow(Script(run, (JobState("48", "UNKNOWN", "none", note="down"), "")), io.StringIO())


def test_local_run_is_kept_like_a_slurm_job(
    uneven: Path, submit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, sys\n"
        "rank = os.environ['SLURM_PROCID']\n"
        "print('hello', rank)\n"
        "sys.exit(3 if rank == '2' else 0)\n"
    )
    done = submit("--backend", "local", "--gpus", "3", "--", "rank.py")
    assert done.returncode == 3
    (folder,) = (tmp_path / RUNS_FOLDER).iterdir()
    assert f"run {folder.name}, kept in {RUNS_FOLDER}/{folder.name}" in done.stderr
    monkeypatch.chdir(tmp_path)
    _, state = find_job(folder.name)
    assert (state.state, state.exit_status, state.source) == ("FAILED", 3, "exit marker")
    log = (folder / "log").read_text()
    assert set(done.stdout.splitlines()) <= set(log.splitlines())
    assert "[2 beta] rank 2 on beta exited with 3" in log
    assert "hello" not in done.stderr
    with pytest.raises(JobError, match="is not running; its state is FAILED"):
        jobs.cancel(folder.name)


def refused(pidfd: int, number: int) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_cancel_ends_a_local_run(
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
        job, state = find_job(folder.name)
        assert state.state == "RUNNING"
        assert (tmp_path / f"logs/{folder.name}.out").read_text() == "[0 gamma] up\n"
        with monkeypatch.context() as another_user:
            another_user.setattr(signal, "pidfd_send_signal", refused)
            with pytest.raises(JobError, match="its launcher is another user's process"):
                jobs.cancel(folder.name)
        jobs.cancel(folder.name)
        assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    assert (job.state().state, job.state().exit_status) == ("CANCELLED", 143)


def local_run(run: Run, **launcher: object) -> Run:
    return run._replace(job_id="local-20260101T000000-1", backend="local", process=launcher)


def test_foreground_state_without_a_launcher(run: Run) -> None:
    me, here = os.getpid(), socket.gethostname()
    begun = process.process_start(me)
    assert begun
    assert (
        process.foreground_state(local_run(run, host=here, pid=me, started=begun)).state
        == "RUNNING"
    )
    # the pid belongs to another process now
    gone = process.foreground_state(local_run(run, host=here, pid=me, started=begun - 1))
    assert gone.state == "FAILED"
    assert "ended without an exit marker" in gone.describe()
    elsewhere = process.foreground_state(local_run(run, host="elsewhere", pid=me, started=begun))
    assert elsewhere.describe() == "UNKNOWN (it was started on elsewhere: ask there)"
    assert process.process_start(0) is None


def test_status_imports_only_what_it_uses(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ddp_slurm import cli, console\n"
        "try:\n"
        "    console.run(cli.make_parser(sys.argv[1:]))\n"
        "finally:\n"
        "    print(*sys.modules)\n"
    )
    words = ["status", "local-20260101T000000-1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert "no run 'local-20260101T000000-1' under this folder" in done.stderr
    unused = {"dataclasses", "inspect", "tempfile", "yaml", "jinja2", "ddp_slurm.plan"}
    assert not unused & set(done.stdout.split())
