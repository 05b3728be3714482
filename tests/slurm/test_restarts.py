"""A job with restarts left survives a lost node, a preemption and a slurmctld that is away."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.lab import Lab, daemons, network
from ddp_slurm.lab.releases import RELEASES, ReleaseNotAvailable, slurm_root
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch

from .conftest import LIVE_CLUSTER, wait_until_watched

pytestmark = pytest.mark.timeout(900)
POLL_SECONDS = 0.2
NODES = {"first": "gamma", "middle": "beta", "last": "alpha"}
FINISHED = ["COMPLETED"] * 3
ALL_RELEASES = os.environ.get("DDP_SLURM_TEST_RELEASES") == "all"
NODE_LOSS_RELEASES = list(RELEASES) if ALL_RELEASES else ["22.05"]
SHORT_LOSS_PLACES = list(NODES) if ALL_RELEASES else ["first", "middle"]
"""In two minutes the last node shows what the middle one does: ``make test-releases`` has all."""

RANK = """\
touch "up.$SLURM_PROCID.$SLURM_RESTART_COUNT"
echo "rank $SLURM_PROCID restart ${SLURM_RESTART_COUNT:-0}"
[[ -n ${SLURM_RESTART_COUNT:-} ]] || exec bash first_run.sh
"""


@dataclass
class Component:
    """One component of a job as squeue reports it."""

    state: str
    restarts: int
    reason: str


@dataclass
class Job:
    """A submitted job of 1, 2 and 4 ranks."""

    lab: Lab
    id: str
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def components(self) -> list[Component]:
        """Empty where slurmctld does not respond."""
        columns = "--Format=State:20,RestartCnt:10,Reason:60"
        argv = ["squeue", "--noheader", "--states=all", f"--jobs={self.id}", columns]
        done = self.lab.run(argv, capture_output=True, text=True)
        lines = [line.split(None, 2) for line in done.stdout.splitlines()]
        return [Component(state, int(restarts), reason) for state, restarts, reason in lines]

    def wait_until(self, happened: Callable[[list[Component]], bool]) -> list[Component]:
        """Poll until it happened; the time-out of the test ends it otherwise."""
        while True:
            components = self.components()
            if components and happened(components):
                return components
            time.sleep(POLL_SECONDS)

    def wait_until_it_has_run_again(self) -> None:
        """Raises AssertionError where it ends in another way."""
        components = self.wait_until(lambda found: ended(found) and found[0].restarts > 0)
        assert [component.state for component in components] == FINISHED, self.log
        for rank in range(7):
            assert f"{rank}: rank {rank} restart {components[0].restarts}\n" in self.log


def ended(components: list[Component]) -> bool:
    going_on = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}
    return not any(component.state in going_on for component in components)


@pytest.fixture
def submit(tmp_path: Path, clean_environ: dict[str, str]) -> Callable[..., Job]:
    """``submit(lab, first_run, **options)``: a job that is up; its ranks run the script first_run.

    After a restart they end at once. ``signs``: how many files ``up.*`` show that the job is up.
    """

    def run(lab: Lab, first_run: str, *, signs: int = 7, **options: object) -> Job:
        for name, text in (("rank.sh", RANK), ("first_run.sh", first_run)):
            (tmp_path / name).write_text(text)
        (tmp_path / "cluster.yaml").write_text(LIVE_CLUSTER)
        values = {"command": ["bash", "rank.sh"], "output": str(tmp_path / "log"), "time": "20"}
        plan = make_plan(
            Cluster.load(tmp_path / "cluster.yaml"), JobOptions.read({**values, **options})
        )
        submitted = lab.run(
            ["sbatch", "--parsable"],
            input=render_sbatch(plan, tmp_path / "runs"),
            env=clean_environ,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        while len(list(tmp_path.glob("up.*."))) < signs:
            time.sleep(POLL_SECONDS)
        return Job(lab, submitted.stdout.strip(), tmp_path)

    return run


Submit = Callable[..., Job]


def configure(lab: Lab, changes: dict[str, str], more: str = "") -> None:
    """Replace patterns in slurm.conf, append lines, and start slurmctld again."""
    text = lab.slurm_conf.read_text()
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        assert count, f"{pattern} is not in slurm.conf"
    lab.slurm_conf.write_text(text + more)
    stop_slurmctld(lab)
    daemons.start_slurmctld(lab)
    daemons.wait_for_nodes(lab)


def stop_slurmctld(lab: Lab) -> None:
    for pid in network.processes(lab.switch):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if "slurmctld" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGTERM)
    while daemons.is_running(lab, None, "slurmctld"):
        time.sleep(POLL_SECONDS)


@pytest.fixture(params=NODE_LOSS_RELEASES)
def fragile_lab(request: pytest.FixtureRequest, make_lab: Callable[..., Lab]) -> Lab:
    """A lab of its own whose dead nodes are DOWN within some ten seconds."""
    try:
        root = slurm_root(request.param)
    except ReleaseNotAvailable as reason:
        pytest.skip(f"Slurm {request.param}: {reason}")
    lab = make_lab(LIVE_CLUSTER, slurm_root=root)
    configure(lab, {"^SlurmdTimeout=.*": "SlurmdTimeout=8"})
    return lab


HANGS = "exec sleep 600"
NOTICES = "sleep 20; exit 1"


@pytest.mark.parametrize("place", SHORT_LOSS_PLACES)
def test_job_runs_again_after_a_node_was_away_for_8_s(
    fragile_lab: Lab, submit: Submit, place: str
) -> None:
    """The ranks hang for ever on the releases whose srun reports the lost node, and fail on others.

    On 20.11, and from 24.11 on, neither slurmctld nor srun reports that the tasks of such a node
    are gone.
    """
    is_reported = (22, 5) <= slurm_release(fragile_lab) < (24, 11)
    job = submit(fragile_lab, HANGS if is_reported else NOTICES, max_restarts=2)
    # On 20.11 it begins seconds later; on a node just revived it would look like the ranks' step.
    wait_until_watched(fragile_lab, NODES["middle"])
    fragile_lab.kill(NODES[place])
    time.sleep(8)
    fragile_lab.revive(NODES[place])
    job.wait_until_it_has_run_again()


def slurm_release(lab: Lab) -> tuple[int, int]:
    major, minor = daemons.slurm_version(lab).split(".")[:2]
    return int(major), int(minor)


@pytest.mark.parametrize("place", NODES)
def test_job_waits_for_a_lost_node_and_runs_again(
    fragile_lab: Lab, submit: Submit, place: str
) -> None:
    """All components wait, so that other jobs can have the nodes; each has its restart counted.

    With the first node the job script is lost: a step on another node requeues the others.
    """
    job = submit(fragile_lab, "exec sleep 600", max_restarts=2)
    wait_until_watched(fragile_lab, "beta")
    fragile_lab.kill(NODES[place])
    job.wait_until(lambda found: found[0].state == "PENDING" and "Res" in found[0].reason)
    waiting = job.wait_until(lambda found: all(item.state == "PENDING" for item in found))
    assert [component.restarts for component in waiting] == [1, 1, 1]
    assert not (job.folder / "runs" / job.id / "exit").exists()
    fragile_lab.revive(NODES[place])
    job.wait_until_it_has_run_again()


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_first_node_lost_before_the_ranks_start_frees_all(
    fragile_lab: Lab, submit: Submit, launcher: str, tmp_path: Path
) -> None:
    """The watching step begins before the commands of --setup, whatever starts the ranks."""
    if slurm_release(fragile_lab) < (21, 8):
        pytest.skip("Slurm 20.11 starts no step beside the watching one")
    setup = "[[ -n ${SLURM_RESTART_COUNT:-} ]] || { touch up.setup.; sleep 600; }"
    # Python of this machine lacks libraries in another release's root: torchrun is not the subject.
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nexec bash rank.sh\n")
    python.chmod(0o755)
    options = {"launcher": launcher, "setup": [setup], "python": str(python), "max_restarts": 2}
    job = submit(fragile_lab, "", signs=1, **options)
    wait_until_watched(fragile_lab, "beta")
    fragile_lab.kill("gamma")
    waiting = job.wait_until(lambda found: all(item.state == "PENDING" for item in found))
    assert [component.restarts for component in waiting] == [1, 1, 1]
    fragile_lab.revive("gamma")
    components = job.wait_until(lambda found: ended(found) and found[0].restarts > 0)
    assert [component.state for component in components] == FINISHED, job.log
    assert " restart 1\n" in job.log


def test_lost_node_without_restarts_ends_the_job(fragile_lab: Lab, submit: Submit) -> None:
    job = submit(fragile_lab, "exec sleep 600")
    fragile_lab.kill("beta")
    components = job.wait_until(ended)
    assert "NODE_FAIL" in [component.state for component in components]
    assert "COMPLETED" not in [component.state for component in components]


SAVES_AND_STOPS = """
trap '[[ $SLURM_PROCID != 0 ]] || { sleep 4; touch "$DDP_SLURM_REQUEUE_MARKER"; }; exit 0' USR2
touch "ready.$SLURM_PROCID"
while :; do sleep 0.1; done
"""


def test_requeue_waits_for_a_slurmctld_that_is_away(
    make_lab: Callable[..., Lab], submit: Submit
) -> None:
    lab = make_lab(LIVE_CLUSTER)
    job = submit(lab, SAVES_AND_STOPS, max_restarts=1, signal_seconds=60)
    while len(list(job.folder.glob("ready.*"))) < 7:
        time.sleep(POLL_SECONDS)
    lab.run(["scancel", "--signal=USR2", job.id], check=True)
    stop_slurmctld(lab)
    time.sleep(20)
    assert "requeued" not in job.log
    daemons.start_slurmctld(lab)
    job.wait_until_it_has_run_again()
    assert "stopped early with a snapshot; requeued (1 of 1)\n" in job.log


URGENT = (
    "PartitionName=urgent Nodes=gamma,beta,alpha PriorityTier=10 PreemptMode=OFF State=UP\n"
    "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
    # Rank 0 ends later than the others.
    "WaitTime=1\n"
)


@pytest.mark.parametrize("first_run", ["exec sleep 600", SAVES_AND_STOPS], ids=["dies", "saves"])
def test_preempted_job_runs_again(
    make_lab: Callable[..., Lab], submit: Submit, first_run: str
) -> None:
    """Slurm sends SIGTERM to the ranks, and requeues the job itself only after the grace time."""
    lab = make_lab(LIVE_CLUSTER)
    grace = {"^(PartitionName=all .*)": r"\1 PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE"}
    configure(lab, grace, URGENT)
    saves = first_run == SAVES_AND_STOPS
    if saves:
        first_run = first_run.replace("USR2", "TERM USR2")
    job = submit(lab, first_run, max_restarts=1)
    urgent = ["--partition=urgent", "--nodelist=gamma", "--gres=gpu:titan:1", "--exclusive"]
    argv = ["sbatch", *urgent, "--time=1", "--output=/dev/null", "--wrap=true"]
    lab.run(argv, check=True, stdout=subprocess.DEVNULL)
    job.wait_until_it_has_run_again()
    reason = "stopped early with a snapshot" if saves else "preempted"
    assert f"job script: {reason}; requeued (1 of 1)\n" in job.log


def test_sigterm_to_the_script_of_a_running_job_saves(live_lab: Lab, submit: Submit) -> None:
    job = submit(live_lab, SAVES_AND_STOPS, max_restarts=1, signal_seconds=60)
    while len(list(job.folder.glob("ready.*"))) < 7:
        time.sleep(POLL_SECONDS)
    live_lab.run(["scancel", "--batch", "--signal=TERM", job.id], check=True)
    job.wait_until_it_has_run_again()
    assert "stopped early with a snapshot; requeued (1 of 1)\n" in job.log
