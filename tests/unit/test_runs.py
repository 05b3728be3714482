"""The run folder: what was submitted, read again and repeated."""

import json
import os
import platform
import pwd
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.log_path import log_path
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.runs_folder import RUNS_FOLDER, runs_folder
from ddp_slurm.job.write import job_yaml
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.plan.request import Request, load_options
from ddp_slurm.render import render_sbatch
from ddp_slurm.runs import keep as keeping
from ddp_slurm.runs.job import find_job
from ddp_slurm.runs.keep import Submission, keep_run, make_runs_folder, plan_as_dict, versions
from ddp_slurm.runs.run_folder import (
    Run,
    RunError,
    find_run_beside,
    find_runs,
    load_run,
)
from ddp_slurm.slurm_client.sources import parse_exit_marker
from ddp_slurm.slurm_client.states import ComponentState, JobState

from .conftest import Stub

EVERYTHING = {
    "command": ["python", "my train.py", "it's", "5"],
    "nodes": "gamma,alpha",
    "gpus": "5",
    "name": "a run",
    "time": "12:00:00",
    "output": "logs/%x-%j.out",
    "partition": "big",
    "account": "0123",
    "qos": "no",
    "cpus_per_task": "4",
    "memory": "30G",
    "signal_seconds": "90",
    "max_restarts": "3",
    "env": ["A=x: y", "B=1_0"],
    "setup": ["module load cuda # 12"],
    "venv": "/opt/my env",
    "global_batch_size": "256",
    "comm": "local:8",
    "sbatch": ["reservation=lab", "1:exclusive", "0:comment=a=b"],
}


def plan_of(uneven: Path, **options: object) -> Plan:
    return make_plan(
        Cluster.load(uneven), JobOptions.read({"command": ["python", "train.py"], **options})
    )


def keep(plan: Plan, runs: Path, job_id: str = "48", **kwargs: object) -> Run:
    values = {
        "backend": "sbatch",
        "script": "#!/bin/bash\n",
        "submitted_at": time.time(),
        **kwargs,
    }
    run = keep_run(Submission(plan, **values), runs, job_id)  # type: ignore[arg-type]
    assert run is not None
    return run


@pytest.mark.parametrize(
    "values",
    [EVERYTHING, {"command": ["x"], "container": "apptainer:/i.sif", "mount": ["/d:/e:ro"]}],
)
def test_job_yaml_reads_back_as_the_same_options(tmp_path: Path, values: dict[str, object]) -> None:
    options = load_options(Request(None, None, values))
    (tmp_path / "job.yaml").write_text(job_yaml(options))
    assert load_options(Request(None, tmp_path / "job.yaml", {})) == options


def test_run_is_kept_and_found(
    uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of(uneven, output="logs/%x-%j.out", env=["TOKEN=secret"])
    run = keep(
        plan, runs_folder(plan.options.output), cluster_file=uneven, script="export TOKEN=secret\n"
    )
    assert run.folder == tmp_path / "logs" / RUNS_FOLDER / "48"
    assert load_run(run.folder) == run
    assert find_runs("48") == find_runs("48", tmp_path / "logs") == [run]
    assert find_runs("48", tmp_path) == find_runs("49") == []
    assert run.log == str(tmp_path / "logs/lab-48.out")
    assert (run.folder / "cluster.yaml").read_text() == uneven.read_text()
    ranks = run.plan["ranks"]
    assert [rank["node"] for rank in ranks] == ["gamma", "beta", "beta", *["alpha"] * 4]
    assert json.loads((run.folder / "versions.json").read_text())["packages"]["ddp_slurm"]
    for path in run.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.chdir("/")
    assert find_runs("48") == []
    assert find_run_beside(str(tmp_path / "logs/lab-48.out"), "48") == run
    assert find_run_beside(str(tmp_path / "logs/other.out"), "48") is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # another user's
    assert find_runs("48", tmp_path / "logs") == []


def test_find_job_chooses_between_runs_of_a_number(
    uneven: Path, tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, month in (("a", "01"), ("b", "03"), ("c", "02")):
        monkeypatch.setattr(keeping, "utc_now", lambda month=month: f"2026-{month}-01T00:00:00Z")
        keep(plan_of(uneven, output=f"{name}/%j.out"), tmp_path / name / RUNS_FOLDER)
    record = "JobId=48 JobName=x\n   JobState=RUNNING Reason=None\n   StdOut="
    expected = {"": "b", f"{tmp_path}/a/48.out": "a", f"{tmp_path}/a/%x.out": "b"}
    for log, name in expected.items():
        stub("scontrol", f"printf '%s\\n' '{record}{log}'")
        job, _ = find_job("48")
        assert job.run is not None
        assert job.run.log == f"{tmp_path}/{name}/48.out"
    stub("scontrol", f"echo '{record}/elsewhere'")
    assert find_job("48")[0].run is None
    run = find_runs("48")[0]
    run.remember(JobState("48", "FAILED", "scontrol", log="/elsewhere"))
    assert run.last_look() is None, "that is another job of the same number"


def test_find_job_in_a_folder_with_an_older_job(uneven: Path, tmp_path: Path, stub: Stub) -> None:
    run = keep(plan_of(uneven, output=f"{tmp_path}/a/%j.out"), tmp_path / "a" / RUNS_FOLDER)
    run.leave_exit_marker(3)
    stub("scontrol", r"printf 'JobId=48 JobName=x\n   JobState=RUNNING\n   StdOut=/elsewhere\n'")
    job, state = find_job("48", tmp_path / "a")
    assert job.run == run
    assert (state.state, state.source) == ("FAILED", "exit marker")


def test_repeat_line_submits_the_same_again(
    uneven: Path, submit: object, tmp_path: Path, stub: object
) -> None:
    stub("sbatch", 'cat > "$RECORD"; echo 48')  # type: ignore[operator]
    (tmp_path / "speeds.yaml").write_text(
        "titan: {beta: 0.01}\nv100: {beta: 0.005}\na100: {beta: 0.002}\n"
    )
    record = tmp_path / "first"
    args = [
        "--time",
        "10",
        "--balance",
        "speeds.yaml",
        "--global-batch-size",
        "256",
        "--env",
        "A=b c",
        "--",
        "train.py",
        "it's",
    ]
    done = submit(*args, env={"RECORD": str(record)})  # type: ignore[operator]
    assert done.returncode == 0, done.stderr
    (tmp_path / "speeds.yaml").unlink()
    uneven.unlink()
    run = load_run(tmp_path / RUNS_FOLDER / "48")
    script = (run.folder / "script.sh").read_text()
    assert record.read_text().startswith(script)
    again = submit(
        *run.repeat[2:], env={"RECORD": str(tmp_path / "second")}, cwd=Path(run.directory)
    )  # type: ignore[operator]
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "second").read_text().startswith(script)


@pytest.mark.parametrize("file", [None, Path("/dev/null")])
def test_cluster_yaml_is_written_from_the_plan(
    uneven: Path, tmp_path: Path, file: Path | None
) -> None:
    uneven.write_text(uneven.read_text() + "    address: 10.0.0.1\nssh: {user: ops}\n")
    plan = plan_of(uneven, nodes="beta,alpha")
    run = keep(plan, tmp_path / RUNS_FOLDER, cluster_file=file)
    again = make_plan(Cluster.load(run.folder / "cluster.yaml"), plan.options.replaced(nodes=None))
    assert (again.components, again.machines) == (plan.components, plan.machines)


def test_older_run_of_the_same_number_is_set_aside(uneven: Path, tmp_path: Path) -> None:
    plan = plan_of(uneven)
    old = keep(plan, tmp_path, script="old")
    (old.folder / "exit").write_text("status=1\n")
    for path in old.folder.iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))
    submitted_at = time.time() - 30
    (old.folder / "exit").write_text(
        "status=0\n"
    )  # the new job has ended before its folder was written
    new = keep(plan, tmp_path, script="new", submitted_at=submitted_at)
    assert (new.folder / "script.sh").read_text() == "new"
    assert new.exit_marker() == "status=0\n"
    (aside,) = new.folder.glob("before-*")
    assert (aside / "script.sh").read_text() == "old"
    assert not (aside / "exit").exists()


def test_run_that_cannot_be_kept_is_reported(
    uneven: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert keep_run(Submission(plan_of(uneven), "sbatch", "", 0.0), tmp_path / "file", "48") is None
    assert f"job 48 is not kept in {tmp_path / 'file'}" in capsys.readouterr().err
    with pytest.raises(RunError, match="cannot be made: Not a directory; it is beside the log"):
        make_runs_folder(tmp_path / "file" / "x")


@pytest.mark.parametrize(
    ("output", "log", "folder"),
    [
        ("%x-%j.out", "/w/lab-48.out", "/w"),
        ("/a/%j/log", "/a/48/log", "/a"),
        ("l/%x/%j/o", "/w/l/lab/48/o", "/w/l"),
        ("100%%.out", "/w/100%.out", "/w"),
        ("%N.out", None, "/w"),
        ("../o", "/o", "/"),
        ("/dev/null", "/dev/null", "/w"),
        ("/a%%j/%j", "/a%j/48", "/a%j"),
    ],
)
def test_log_and_folder(
    uneven: Path, monkeypatch: pytest.MonkeyPatch, output: str, log: str | None, folder: str
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/w")
    options = JobOptions(output=output)
    assert log_path(options, "lab", "48") == log
    assert runs_folder(output) == Path(folder) / RUNS_FOLDER


def test_plan_as_dict(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: lab\nnodes: [{name: 'n[1-2]', gpus: {type: a100, count: 2}, "
        "cpus: 8, memory: 30G, partition: big, "
        "constraint: nvlink, interface: eno1}]\n"
    )
    plan = plan_of(path, gpus="4", name="mine", launcher="torchrun", global_batch_size="10")
    assert plan_as_dict(plan) == {
        "name": "mine",
        "cluster": "lab",
        "world_size": 4,
        "components": [
            {
                "nodes": ["n1", "n2"],
                "gres": "gpu:a100:2",
                "tasks_per_node": 2,
                "cpus_per_task": 4,
                "memory_mb": 30720,
                "partition": "big",
                "constraint": "nvlink",
                "interface": "eno1",
            }
        ],
        "ranks": [
            {
                "rank": rank,
                "component": 0,
                "node": node,
                "node_rank": node_rank,
                "local_rank": local_rank,
                "gpu_type": "a100",
                "share": share,
            }
            for rank, node, node_rank, local_rank, share in [
                (0, "n1", 0, 0, 3),
                (1, "n1", 0, 1, 3),
                (2, "n2", 1, 0, 2),
                (3, "n2", 1, 1, 2),
            ]
        ],
        "step_env": plan.job_env().to_environ(),
        "launcher": "torchrun",
    }


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo 22.05.8 '' $*", "22.05.8  {}"),
        ("exit 0", None),
        ("echo bad; exit 1", None),
        ("exec sleep 60", None),
    ],
)
def test_versions(
    program: str, said: str | None, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in program:
        monkeypatch.setattr("ddp_slurm.runs.keep.VERSION_SECONDS", 0.1)
    for name in ("scontrol", "git"):
        stub(name, program)
    found = versions()
    asked = {"slurm": "--version", "git": "describe --always --dirty --abbrev=40"}
    assert {name: found.pop(name) for name in asked} == {
        n: said and said.format(words) for n, words in asked.items()
    }
    kept = ("torch", "torchvision", "numpy", "submitit", "lightning", "accelerate")
    assert set(found.pop("packages")) == {"ddp_slurm", *(name for name in kept if find_spec(name))}
    assert found == {
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "user": pwd.getpwuid(os.geteuid()).pw_name,
    }


@pytest.mark.parametrize(
    ("status", "terminated", "state"),
    [
        (0, "no", "COMPLETED"),
        (3, "no", "FAILED"),
        (130, "yes", "CANCELLED"),
        (143, "yes", "CANCELLED"),
    ],
)
def test_exit_marker_of_a_run_in_the_terminal(
    uneven: Path, tmp_path: Path, status: int, terminated: str, state: str
) -> None:
    run = keep(plan_of(uneven), tmp_path)
    assert run.exit_marker() is None
    run.leave_exit_marker(status)
    text = run.exit_marker() or ""
    ended = r"ended=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    host = re.escape(socket.gethostname())
    assert re.fullmatch(
        f"status={status}\nterminated={terminated}\n{ended}\nhost={host}\nrestarts=0\n", text
    )
    marker = parse_exit_marker(text)
    assert marker is not None
    assert (marker.state, marker.exit_status) == (state, status)


@pytest.mark.parametrize("source", ["squeue", "scontrol", "sacct"])
def test_final_state_is_remembered_once(uneven: Path, tmp_path: Path, source: str) -> None:
    run = keep(plan_of(uneven), tmp_path)
    assert run.last_look() is None
    run.remember(JobState("48", "RUNNING", "squeue"))
    run.remember(JobState("48", "FAILED", "exit marker"))
    assert run.last_look() is None
    timeout = JobState("48", "TIMEOUT", source, (ComponentState("48", "TIMEOUT"),))
    run.remember(timeout)
    run.remember(JobState("48", "COMPLETED", "sacct"))
    assert run.last_look() == timeout
    (run.folder / "state.json").write_text('{"job_id": "48"')
    assert run.last_look() is None


SRUN = {
    "ends": ("exit 0", "status=0\nterminated=no\n"),
    "fails": ("exit 3", "status=3\nterminated=no\n"),
    "a rank is killed": ("exit 143", "status=143\nterminated=no\n"),
    "is cancelled": (
        'touch "$TMPDIR/cancelled"; kill -TERM "$PPID"; exit 0',
        "status=143\nterminated=yes\n",
    ),
    "is requeued": ('touch "$DDP_SLURM_REQUEUE_MARKER"; exit 0', None),
}


SQUEUE = """
[[ $* != *--steps* ]] || exit 0
state=RUNNING
[[ ! -e $TMPDIR/cancelled ]] || state=COMPLETING
echo "48 $state ${SLURM_RESTART_COUNT:-0} N/A"
"""


RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_script(uneven: Path, hostile_folder: Path, tmp_path: Path) -> RunScript:
    """Runs the job script with a stub of the given text for srun."""
    stubs = tmp_path / "bin"
    stubs.mkdir()

    def run(srun: str, env: dict[str, str], **options: str) -> "subprocess.CompletedProcess[str]":
        # the stub runs in place of a subshell, whose parent is the script
        for name, text in {"srun": srun, "scontrol": "exit 0", "squeue": SQUEUE}.items():
            (stubs / name).write_text(f"#!/bin/bash\n{text}\n")
            (stubs / name).chmod(0o755)
        script = render_sbatch(plan_of(uneven, **options), hostile_folder)
        env = {
            "PATH": f"{stubs}:/usr/bin:/bin",
            "SLURM_JOB_ID": "48",
            "SLURM_HET_SIZE": "3",
            "TMPDIR": str(tmp_path),
            **env,
        }
        return subprocess.run(
            ["bash"], input=script, env=env, text=True, capture_output=True, timeout=60
        )

    return run


@pytest.mark.parametrize("case", SRUN)
@pytest.mark.parametrize(
    ("options", "env", "last"),
    [
        (
            {"time": "5", "signal_seconds": "60", "max_restarts": "2"},
            {"SLURMD_NODENAME": "gamma", "SLURM_RESTART_COUNT": "1"},
            "host=gamma\nrestarts=1\n",
        ),
        ({}, {"DDP_SLURM_REQUEUE_MARKER": "/dev/null"}, "host=\nrestarts=0\n"),
    ],
    ids=["with a signal", "plain"],
)
def test_exit_marker_of_the_job_script(
    case: str,
    options: dict[str, str],
    env: dict[str, str],
    last: str,
    run_script: RunScript,
    hostile_folder: Path,
    tmp_path: Path,
) -> None:
    body, marker = SRUN[case]
    if marker is None and not options:
        marker = SRUN["ends"][1]  # without a signal there is nothing to requeue for
    kept = hostile_folder / "48"
    kept.mkdir()
    (kept / "exit").write_text("status=9\n")
    (kept / "state.json").write_text("{}")
    status = run_script(body, env, **options).returncode
    if marker is not None:
        text = (kept / "exit").read_text()
        assert re.fullmatch(
            rf"{marker}ended=\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n{last}( *\n)?", text
        )
        assert text.startswith(f"status={status}\n")
    assert sorted(path.name for path in kept.iterdir()) == (["exit"] if marker else [".exit"])
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.parametrize("in_the_way", ["48", "48/.exit/x", "48/.exit -> /dev/full"])
@pytest.mark.parametrize(("status", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_log_has_the_exit_marker_that_cannot_be_written(
    in_the_way: str,
    status: int,
    state: str,
    run_script: RunScript,
    hostile_folder: Path,
    uneven: Path,
    tmp_path: Path,
) -> None:
    name, _, target = in_the_way.partition(" -> ")
    (hostile_folder / name).parent.mkdir(parents=True, exist_ok=True)
    if target:
        (hostile_folder / name).symlink_to(target)
    else:
        (hostile_folder / name).touch()
    done = run_script(f"exit {status}", {})
    assert done.returncode == status
    log = tmp_path / "48.out"
    log.write_text(done.stderr)
    run = keep(plan_of(uneven, output=str(log)), tmp_path / RUNS_FOLDER)
    marker = parse_exit_marker(run.exit_marker() or "")
    assert marker is not None
    assert (marker.state, marker.exit_status, marker.restarts) == (state, status, 0)
    with log.open("a") as file:
        file.write("0: the job was requeued and goes on\n")
    assert run.exit_marker() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_exit_marker_on_a_disk_that_becomes_full(
    run_script: RunScript, hostile_folder: Path, tmp_path: Path
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", hostile_folder], check=True)
    try:
        fill = f"dd if=/dev/zero of={shlex.quote(str(hostile_folder / 'big'))}"
        done = run_script(f"{fill} 2>/dev/null; exit 3", {})
        with pytest.raises(OSError, match="No space left"):
            (hostile_folder / "more").write_text("x" * 10_000)
        text = (hostile_folder / "48" / "exit").read_text()
    finally:
        subprocess.run(["umount", hostile_folder], check=True)
    assert done.returncode == 3
    assert text.startswith("status=3\nterminated=no\n")
    assert "no exit marker" not in done.stderr


@pytest.mark.parametrize(("text", "begun"), [(None, False), ("", False), (" " * 9, True)])
def test_run_that_has_begun(uneven: Path, tmp_path: Path, text: str | None, begun: bool) -> None:
    run = keep(plan_of(uneven), tmp_path)
    if text is not None:
        (run.folder / ".exit").write_text(text)
    assert run.has_begun() == begun


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_script_with_an_exit_marker_passes_shellcheck(uneven: Path, hostile_folder: Path) -> None:
    script = render_sbatch(
        plan_of(uneven, time="5", signal_seconds="60", max_restarts="2"), hostile_folder
    )
    done = subprocess.run(
        ["shellcheck", "--shell=bash", "-"], input=script, text=True, capture_output=True
    )
    assert done.stdout == ""
    assert "\n_ddp_runs_folder=\n" in render_sbatch(plan_of(uneven))
