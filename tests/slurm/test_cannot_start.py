"""Jobs that wait for what will not happen are shown as such, and so is a hostile name."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_slurm.lab import Lab
from ddp_slurm.runs.job import find_job
from ddp_slurm.slurm_client.sources import active_states, read_state
from ddp_slurm.slurm_client.states import JobState
from tests.waiting import wait_until

from .conftest import LIVE_CLUSTER, wait_until_watched

pytestmark = pytest.mark.timeout(600)
Submit = Callable[..., str]


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Lab], Submit]:
    """``enter(lab)``: this process asks the lab; returns ``submit(*options, script="true")``."""

    def into(lab: Lab) -> Submit:
        for name, value in lab.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)

        def submit(*options: str, script: str = "sleep 600") -> str:
            done = lab.run(
                ["sbatch", "--parsable", *options],
                input=f"#!/bin/bash\n{script}\n",
                capture_output=True,
                text=True,
                check=True,
            )
            return done.stdout.strip()

        return submit

    return into


@pytest.fixture
def submit(live_lab: Lab, enter: Callable[[Lab], Submit]) -> Iterator[Submit]:
    """Submits to the shared lab; what was submitted is cancelled in the end."""
    into = enter(live_lab)
    submitted: list[str] = []

    def run(*options: str, script: str = "sleep 600") -> str:
        submitted.append(into(*options, script=script))
        return submitted[-1]

    yield run
    live_lab.run(["scancel", *submitted], capture_output=True)


def wait_for(job_id: str, is_there: Callable[[JobState], bool]) -> JobState:
    wait_until(lambda: is_there(read_state(job_id)), seconds=120)
    return read_state(job_id)


def test_name_and_comment_do_not_change_what_is_read(submit: Submit) -> None:
    hostile = "x JobState=COMPLETED Reason=None Restarts=9 ExitCode=9:0 StdOut=/c"
    job_id = submit("--time=5", f"--job-name={hostile}", f"--comment={hostile}", "--hold")
    state = wait_for(job_id, lambda state: state.state == "HELD")
    assert "scontrol release" in state.note
    assert (state.components[0].restarts, state.exit_status) == (0, None)
    assert state.log is not None
    assert state.log.endswith(f"slurm-{job_id}.out")


def test_dependency_that_is_never_satisfied(submit: Submit) -> None:
    failing = submit("--time=5", script="exit 1")
    job_id = submit("--time=5", f"--dependency=afterok:{failing}")
    state = wait_for(job_id, lambda state: state.state != "PENDING")
    assert (state.state, state.reasons) == ("CANNOT_START", "DependencyNeverSatisfied")
    assert active_states([job_id])[job_id].state == "CANNOT_START"


def test_limits_of_a_partition(live_lab: Lab, submit: Submit) -> None:
    create = "create partitionname=short nodes=beta maxtime=10 maxnodes=1 state=up"
    live_lab.run(["scontrol", *create.split()], check=True)
    try:
        too_long = submit("--partition=short", "--time=11")
        too_many = submit("--partition=short", "--time=5", "--nodes=2")
        for job_id in (too_long, too_many):  # first PartitionConfig, later the limit's own reason
            state = wait_for(job_id, lambda state: state.reasons.startswith("Partition"))
            assert state.state == "CANNOT_START"
    finally:
        live_lab.run(["scancel", "--partition=short"], check=True)
        wait_until(lambda: not active_states([too_long, too_many]), seconds=60)
        live_lab.run(["scontrol", "delete", "partitionname=short"], check=True)


HET_JOB = """\
#SBATCH --time=5 --nodes=1 --nodelist=gamma --requeue
#SBATCH hetjob
#SBATCH --time=5 --nodes=1 --nodelist=beta --requeue
#SBATCH hetjob
#SBATCH --time=5 --nodes=1 --nodelist=alpha --requeue
sleep 600
"""


def test_component_that_a_lost_node_left_behind(
    make_lab: Callable[..., Lab], enter: Callable[[Lab], Submit]
) -> None:
    """Slurm requeues the first component and that of the lost node, and fails the third."""
    lab = make_lab(LIVE_CLUSTER)
    submit = enter(lab)
    job_id = submit(script=HET_JOB)
    wait_for(job_id, lambda state: state.state == "RUNNING")
    lab.kill("beta")
    state = wait_for(job_id, lambda state: state.state == "CANNOT_START")
    assert f"{job_id}+2 is FAILED" in state.note
    assert find_job(f"{job_id}+1")[1].state == "CANNOT_START"
    assert active_states([job_id])[job_id].state == "CANNOT_START"
    lab.revive("beta")
    # One error for each component that is in the queue already.
    subprocess.run(["scontrol", "requeue", job_id], capture_output=True)
    wait_for(job_id, lambda state: state.state == "RUNNING")


def test_status_names_the_lost_node_and_the_command_that_goes_on(
    make_lab: Callable[..., Lab], enter: Callable[[Lab], Submit], tmp_path: Path
) -> None:
    """The first node, with which the job script is lost; the command runs as it is printed."""
    lab = make_lab(LIVE_CLUSTER)
    enter(lab)
    (tmp_path / "cluster.yaml").write_text(LIVE_CLUSTER)
    options = ["--time", "10", "--max-restarts", "2", "--output", "log-%j.out"]
    job_id = ddp_slurm("submit", *options, "--", "sleep", "600").strip()
    wait_until_watched(lab, "beta")
    lab.kill("gamma")
    state = wait_for(job_id, lambda state: state.state == "WAITS_FOR_NODE")
    assert "node gamma is DOWN+NOT_RESPONDING since" in state.note
    assert "(Not responding)" in state.note
    wait_until(lambda: "keep theirs" not in read_state(job_id).note, seconds=90)
    assert active_states([job_id])[job_id].state == "WAITS_FOR_NODE"
    (line,) = re.findall("^without the node: (.*)$", ddp_slurm("status", job_id), re.M)
    line = line.replace("ddp-slurm ", f"{sys.executable} -m ddp_slurm.cli ")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "left out: gamma: its state is DOWN" in done.stderr
    shrunk = wait_for(done.stdout.strip(), lambda state: state.state == "RUNNING")
    assert [part.nodes for part in shrunk.components] == ["beta", "alpha"]
    assert read_state(job_id).state == "CANCELLED"


def ddp_slurm(*words: str) -> str:
    command = [sys.executable, "-m", "ddp_slurm.cli", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
