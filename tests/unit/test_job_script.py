"""What the job script does, run with stubs for srun and Slurm's clients."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch

from .conftest import Stub

RECORD = 'printf "%s\\0" "$@" > "$RECORD"; env -0 > "$RECORD.env"'
STOP_EARLY = 'touch "$DDP_SLURM_REQUEUE_MARKER"'
RUNNING = "7 RUNNING 0 N/A\n8 RUNNING 0 N/A\n9 RUNNING 0 N/A\n"

SQUEUE = """
cd "$FAKE_SLURM"
case "$*" in *--steps*) exec cat steps ;; *) exec cat components ;; esac
"""
SCONTROL = """
cd "$FAKE_SLURM"
case "$*" in
*"show node "*) exec cat nodes ;;
"show hostnames "*) echo "$3" | tr , '\\n'; exit ;;
esac
echo "scontrol $*" >>calls
answer=$(head -n 1 answers) && sed -i 1d answers
[[ -z $answer ]] || { echo "$answer"; exit 1; }
"""
SCANCEL = 'cd "$FAKE_SLURM"; echo "scancel $*" >>calls; : >steps'


def node_record(slurmd_start: str) -> str:
    return f"NodeName=alpha Arch=x86_64 BootTime=None SlurmdStartTime={slurmd_start} Extra=x\n"


@dataclass
class FakeSlurm:
    """What the stubs of Slurm's clients answer, as files in a folder, and how they were called."""

    folder: Path

    def set(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.folder / name).write_text(text)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


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


@dataclass
class Script:
    """A job script and its log; run as slurmstepd does."""

    text: str
    folder: Path

    def start(self, **env: str) -> "subprocess.Popen[str]":
        script = self.folder / "job.sh"
        script.write_text(self.text)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        environ |= {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3", **env}
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", script], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def run(self, **env: str) -> int:
        """Its exit status."""
        with self.start(**env) as process:
            return process.wait(timeout=60)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def exit_marker(self) -> str | None:
        path = self.folder / "runs" / "7" / "exit"
        return path.read_text() if path.exists() else None


@pytest.fixture
def script(tmp_path: Path, uneven: Path) -> Callable[..., Script]:
    """``script(**options)``: the job script of a plan of 1, 2 and 4 ranks."""

    def make(**options: object) -> Script:
        command = {"command": ["python", "train.py", "5", "1"]}
        plan = make_plan(Cluster.load(uneven), JobOptions.read({**command, **options}))
        return Script(render_sbatch(plan, tmp_path / "runs"), tmp_path)

    return make


MakeScript = Callable[..., Script]


def test_srun_gets_every_segment_without_the_batch_shells_sizes(
    script: MakeScript, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", RECORD)
    hostile = ["$(id)", "it's", 'say "x"', "a b", "*", "", "-x", "ü"]
    job = script(command=["python", *hostile], env=["V=a 'b' $HOME"])
    names = ("SLURM_NTASKS", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_MEM_PER_NODE")
    sizes = dict.fromkeys(names, "9")
    assert job.run(RECORD=str(tmp_path / "argv"), **sizes) == 0, job.log
    argv = (tmp_path / "argv").read_text().split("\0")[:-1]
    assert argv[:2] == ["--label", "--kill-on-bad-exit=1"]
    segments = " ".join(argv[2:]).split(" : ")
    assert [segment.split(" python ")[0] for segment in segments] == [
        "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8",
        "--nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=8",
        "--nodes=1 --ntasks=4 --ntasks-per-node=4 --cpus-per-task=8",
    ]
    assert argv[-len(hostile) :] == hostile
    env = dict(
        item.partition("=")[::2] for item in (tmp_path / "argv.env").read_text().split("\0") if item
    )
    assert not set(sizes) & set(env)
    assert env["V"] == "a 'b' $HOME"
    assert env["DDP_SLURM_TASKS_PER_NODE"] == "1,2,4"
    assert "CUDA_VISIBLE_DEVICES" not in job.text


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_env_of_any_name_reaches_the_ranks(
    launcher: str, script: MakeScript, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", RECORD)
    names = ["run_folder", "terminated", "marker", "status", "launch", "command", "attempt", "step"]
    options = {"launcher": launcher, "time": "10", "signal_seconds": 60, "max_restarts": 1}
    job = script(env=[f"{name}=mine" for name in names], **options)
    assert job.run(RECORD=str(tmp_path / "argv"), SLURMD_NODENAME="gamma") == 0, job.log
    assert (tmp_path / "argv").read_text().split("\0")[-5:-1] == ["python", "train.py", "5", "1"]
    env = (tmp_path / "argv.env").read_text().split("\0")
    assert {f"{name}=mine" for name in names} <= set(env)
    assert (job.exit_marker or "").startswith("status=0\nterminated=no\n")


@pytest.mark.parametrize("status", [0, 1, 3, 137])
def test_script_exits_with_the_status_of_srun(status: int, script: MakeScript, stub: Stub) -> None:
    stub("srun", f"exit {status}")
    assert script().run() == status


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_JOB_ID": ""}, "start it with: sbatch"),
        ({"SLURM_HET_SIZE": "1"}, "expected 3 components, got 1"),
    ],
)
def test_script_refuses_to_run_outside_its_job(
    env: dict[str, str], words: str, script: MakeScript, stub: Stub
) -> None:
    stub("srun", "echo started")
    job = script()
    assert job.run(**env) == 2
    assert words in job.log
    assert "started" not in job.log


@pytest.mark.parametrize(
    ("line", "status", "command"),
    [
        ("false", 1, "false"),
        ("module load nothing", 4, "module load nothing"),
        ("source hook.sh", 1, "[[ -e missing ]] (line 2 of hook.sh)"),
        ("true && exit 3", 3, "exit 3"),
        ('eval "$(echo false)"', 1, "false"),
    ],
)
def test_failed_setup_line_is_named_in_the_log(
    line: str, status: int, command: str, script: MakeScript, stub: Stub, tmp_path: Path
) -> None:
    stub("srun", "echo started")
    (tmp_path / "hook.sh").write_text("true\n[[ -e missing ]]\n")
    job = script(setup=[f"cd '{tmp_path}'", "module() { return 4; }", line])
    assert job.run() == status
    assert f"job script: --setup: exit status {status} of: " in job.log
    assert command in job.log or "return 4" in job.log
    assert "started" not in job.log
    assert (job.exit_marker or "").startswith(f"status={status}\n")


def test_failed_conda_hook_is_named_in_the_log(script: MakeScript, stub: Stub) -> None:
    conda = stub("conda", "echo 'conda() { :; }; [[ -n $NOT_SET ]]'")
    job = script(conda_env="torch")
    assert job.run(CONDA_EXE=str(conda)) == 1
    assert "job script: --conda-env: exit status 1 of: [[ -n $NOT_SET ]] (line " in job.log


REQUEUE = {"time": "10", "signal_seconds": 60, "max_restarts": 1}


def test_stop_at_the_time_limit_requeues_up_to_max_restarts(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    job = script(**REQUEUE)
    assert job.run() == 0
    assert "stopped early with a snapshot; requeued (1 of 1)" in job.log
    assert slurm.calls == ["scontrol requeue 7"]
    assert job.exit_marker is None
    assert job.run(SLURM_RESTART_COUNT="1") == 75, "the job must not read COMPLETED"
    assert "all 1 restarts are used up" in job.log
    assert job.run(SLURM_RESTART_COUNT="2") == 75
    assert slurm.calls == ["scontrol requeue 7"]


def test_stop_at_the_time_limit_without_restarts_is_no_success(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    job = script(time="10", signal_seconds=60)
    assert job.run() == 75
    assert "submit again to go on" in job.log
    assert slurm.calls == []


def test_requeue_is_repeated_until_slurmctld_responds(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    away = "Unable to contact slurm controller (connect failure)\n"
    slurm.set(answers=away * 3)
    job = script(**REQUEUE)
    assert job.run() == 0
    assert slurm.calls == ["scontrol requeue 7"] * 4
    assert "requeued (1 of 1)" in job.log


def test_requeue_whose_answer_was_lost_counts(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    slurm.set(answers="Socket timed out on send/recv operation\n" * 9)
    slurm.set(components=RUNNING.replace("RUNNING 0", "COMPLETING 1"))
    job = script(**REQUEUE)
    assert job.run() == 0
    assert slurm.calls == ["scontrol requeue 7"]
    assert "requeued (1 of 1)" in job.log


def test_refused_requeue_ends_the_job_with_the_reason(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    slurm.set(answers="Requested operation is presently disabled for job 7\n")
    job = script(**REQUEUE)
    assert job.run() == 75
    assert "not requeued: Requested operation is presently disabled" in job.log
    assert "requeued (1" not in job.log
    assert (job.exit_marker or "").startswith("status=75\n")


WAIT_FOR_SIGNALS = """
trap 'touch "$DDP_SLURM_REQUEUE_MARKER"; exit 0' USR2
trap 'exit 143' TERM
kill -TERM $PPID
while :; do /bin/sleep 0.05; done
"""


def test_sigterm_of_a_running_job_asks_the_ranks_to_save(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", WAIT_FOR_SIGNALS)
    job = script(**REQUEUE)
    assert job.run() == 0
    assert "stopped early with a snapshot; requeued (1 of 1)" in job.log
    assert job.exit_marker is None


def test_ranks_that_died_of_preemption_are_requeued(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", "exit 143")
    slurm.set(components=RUNNING.replace("N/A", "2026-01-01T00:00:00"))
    job = script(max_restarts=1)
    assert job.run() == 0
    assert "preempted; requeued (1 of 1)" in job.log
    slurm.set(components=RUNNING)
    assert job.run() == 143, "without a preemption it is a failure"


@pytest.mark.parametrize("restarts", [0, 1])
def test_sigterm_of_a_cancelled_job_leaves_the_marker(
    restarts: int, script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", "kill -TERM $PPID; exec /bin/sleep 0.3")
    slurm.set(components=RUNNING.replace("RUNNING", "COMPLETING"))
    job = script(max_restarts=restarts)
    assert job.run() == 143
    assert (job.exit_marker or "").startswith("status=143\nterminated=yes\n")
    assert slurm.calls == []


def test_components_left_behind_by_a_node_failure_are_requeued(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", "kill -TERM $PPID; exec /bin/sleep 0.3")
    lost = "7 COMPLETING 1 N/A\n8 COMPLETING 1 N/A\n9 RUNNING 0 N/A\n"
    slurm.set(components=lost)
    job = script(max_restarts=1)
    assert job.run() == 143
    assert slurm.calls == ["scontrol requeue 7"]
    assert job.exit_marker is None
    slurm.set(components=RUNNING.replace("RUNNING 0", "COMPLETING 1"))
    assert job.run() == 143
    assert slurm.calls == ["scontrol requeue 7"], "all components are requeued already"


def test_restart_cancels_the_old_steps_first(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", 'echo srun >>"$FAKE_SLURM/calls"')
    slurm.set(components="7 RUNNING 1 N/A\n8 RUNNING 0 N/A\n9 RUNNING 0 N/A\n")
    slurm.set(steps="7.batch\n8.0\n9.0\n")
    assert script(max_restarts=1).run(SLURM_RESTART_COUNT="1") == 0
    assert slurm.calls == ["scancel 8.0 9.0", "srun"]


def test_restart_without_a_component_requeues_all(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", 'echo srun >>"$FAKE_SLURM/calls"')
    slurm.set(components="7 RUNNING 1 N/A\n8 TIMEOUT 0 N/A\n9 RUNNING 0 N/A\n")
    job = script(max_restarts=2)
    assert job.run(SLURM_RESTART_COUNT="1") == 0
    assert slurm.calls == ["scontrol requeue 7"]
    assert "a component of the job does not run; requeued (2 of 2)" in job.log


LOST = 'echo "srun: error: Cannot communicate with node 0.  Aborting job." >&2\n'


@pytest.mark.parametrize("ending", ["exit 1", "exec /bin/sleep 60"])
def test_srun_that_lost_a_node_is_ended_and_requeued(
    ending: str, script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", LOST + ending)
    job = script(max_restarts=1)
    assert job.run() == 0
    assert slurm.calls == ["scontrol requeue 7"]
    assert "a node was lost; requeued (1 of 1)" in job.log
    assert job.run(SLURM_RESTART_COUNT="1") == (1 if ending == "exit 1" else 137)


def test_failure_after_a_node_restarted_is_requeued(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", "exit 1")
    job = script(max_restarts=1)
    assert job.run() == 1
    assert slurm.calls == []
    slurm.set(nodes=node_record("2026-01-01T00:00:00") + node_record("2999-01-01T00:00:00"))
    assert job.run() == 0
    assert "a node was lost; requeued (1 of 1)" in job.log


def test_tasks_of_srun_are_reported_as_ranks(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    messages = [
        "srun: error: alpha: task 1: Exited with exit code 3",
        "srun: error: gamma: task 0: Killed",
        "srun: error: beta: tasks 0-1: Terminated",
    ]
    lines = "".join(f"echo '{line}' >&2\n" for line in messages)
    stub("srun", "echo '3: srun: error: alpha: task 0: not from srun'\n" + lines + "exit 3")
    groups = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": name for i, name in enumerate(("gamma", "beta"))}
    job = script()
    assert job.run(**groups, SLURM_JOB_NODELIST_HET_GROUP_2="alpha") == 3
    assert [line for line in job.log.splitlines() if line.startswith("job script")] == [
        "job script: rank 4 on alpha: Exited with exit code 3",
        "job script: rank 0 on gamma: Killed",
        "job script: ranks 1-2 on beta: Terminated",
    ]
