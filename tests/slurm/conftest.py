"""Live Slurm for the tests, in labs with names of their own: test runs can go on side by side."""

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.lab import Lab, LabError, network
from ddp_slurm.lab.lab import all_labs
from ddp_slurm.lab.machine import check_machine
from ddp_slurm.lab.releases import RELEASES, ReleaseNotAvailable, slurm_root
from ddp_slurm.slurm_client.records import read_records
from ddp_slurm.slurm_client.states import FINAL_STATES
from tests.clusters import UNEVEN
from tests.waiting import wait_until

LIVE_CLUSTER = UNEVEN
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slurm")


@pytest.fixture(scope="session")
def needs_lab() -> None:
    try:
        check_machine()
    except LabError as reason:
        pytest.skip(f"no live Slurm: {reason}")
    for lab in all_labs():
        owner = re.match(r"test-([0-9]+)(-|$)", lab.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():  # of a test run that was killed
            with contextlib.suppress(LabError):  # another test run is removing it
                lab.down()


@pytest.fixture
def new_name() -> str:
    """A lab's name that no other test run uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(scope="session")
def live_lab(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The lab that all tests share, with the nodes of UNEVEN. Leave its nodes alive."""
    cluster = load_cluster(LIVE_CLUSTER, tmp_path_factory.mktemp("live_lab"))
    with Lab.up(cluster, f"test-{os.getpid()}") as lab:
        yield lab


def load_cluster(text: str, folder: Path) -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return Cluster.load(file)


def wait_for_node(lab: Lab, node: str, state: str) -> str:
    """Wait until Slurm's state of a node begins with ``state``; returns all of it."""
    wait_until(
        lambda: lab.status()[node].startswith(state),
        lambda: f"{node} to become {state}: {lab.status()}",
    )
    return lab.status()[node]


def wait_until_watched(lab: Lab, node: str) -> None:
    """Wait until the step that watches a job's first node runs on ``node``.

    That Slurm knows the step is not enough: its start still needs srun on the first node.
    """

    def runs() -> bool:
        for pid in network.processes(lab.node(node).netns):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"_ddp_requeue_with_first_component" in words:
                    return True
        return False

    wait_until(runs, f"the watching step on {node}")


@pytest.fixture
def make_lab(needs_lab: None, tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """``make_lab(cluster_yaml, **arguments_of_Lab_up)``: a lab for this test alone."""
    labs: list[Lab] = []

    def make(text: str, **kwargs: object) -> Lab:
        number = next(_numbers)
        folder = tmp_path / f"lab{number}"
        folder.mkdir()
        labs.append(Lab.up(load_cluster(text, folder), f"test-{os.getpid()}-{number}", **kwargs))
        return labs[-1]

    yield make
    for lab in labs:
        if lab.folder.exists():
            lab.down()


@dataclass(frozen=True)
class FinishedJob:
    """A job that has ended: its id, final state such as ``COMPLETED``, and what it wrote."""

    id: int
    state: str
    output: str


def wait_for_job(lab: Lab, job_id: int) -> str:
    """Wait for the end of all components; returns the state of the first that is not COMPLETED."""
    wait_until(
        lambda: all(state in FINAL_STATES for state in job_states(lab, job_id)),
        lambda: f"the end of job {job_id}: {job_states(lab, job_id)}",
        seconds=600,
    )
    states = job_states(lab, job_id)
    return next((state for state in states if state != "COMPLETED"), "COMPLETED")


def job_states(lab: Lab, job_id: int) -> list[str]:
    """Slurm's states of a job's components."""
    answer = lab.ask(["scontrol", "show", "job", str(job_id)])
    assert answer.status == 0, answer.text
    return [record["JobState"] for record in read_records(answer.out, "JobId")]


@pytest.fixture
def run_job(tmp_path: Path, clean_environ: dict[str, str]) -> Callable[..., FinishedJob]:
    """``run_job(lab, script_text, *sbatch_options, env={})``: submit here and wait for the end."""

    def run(
        lab: Lab, script: str, *options: str, env: Mapping[str, str] | None = None
    ) -> FinishedJob:
        file = tmp_path / "job.sh"
        file.write_text(script)
        output = tmp_path / f"job-{next(_numbers)}.out"
        submitted = lab.run(
            ["sbatch", "--parsable", f"--output={output}", "--time=3", *options, str(file)],
            env={**clean_environ, **(env or {})},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        job_id = int(submitted.stdout)
        state = wait_for_job(lab, job_id)
        return FinishedJob(job_id, state, output.read_text() if output.exists() else "")

    return run


CHOSEN_RELEASES = os.environ.get("DDP_SLURM_TEST_RELEASES", "22.05,24.11")
NOT_ABOUT_THE_CONFIGURATION = [
    # The first start of a cluster has no state yet.
    r"Could not open .* state file .*: No such file or directory",
    r"NOTE: Trying backup state save file",
    r"No fed_mgr state file",
    # slurmdbd speaks to a slurmctld that is still starting.
    r"update cluster: Connection refused",
    # Debian builds the plugin and leaves the library out.
    r"mpi/pmix|pmi/pmix",
    # Slurm looks at an errno that it has not cleared, then takes 100 (one start of six on 24.11).
    r"Unable to convert node_reg_mem_percent=95 value to double",
    # A client that ended while a daemon was still writing to it.
    r"Connection reset by peer",
    # Slurm times the clock when it starts: the machine is busy.
    r"High latency for 1000 calls to gettimeofday",
    # What the machine has: no mail program, an old kernel interface.
    r"Configured MailProg is invalid",
    r"cgroup/v1 plugin is deprecated",
]
COMPLAINT = re.compile(
    r"error|warning|fatal|deprecated|obsolete|defunct|ignor|unknown|unrecognized|invalid", re.I
)


@pytest.fixture(
    scope="module", params=RELEASES if CHOSEN_RELEASES == "all" else CHOSEN_RELEASES.split(",")
)
def release(request: pytest.FixtureRequest, needs_lab: None) -> tuple[str, Path | None]:
    """A Slurm release and the root folder of the system that has it (None: this machine)."""
    try:
        return request.param, slurm_root(request.param)
    except ReleaseNotAvailable as reason:
        pytest.skip(f"Slurm {request.param}: {reason}")


@pytest.fixture
def complaints() -> Callable[[Path], list[str]]:
    """``complaints(folder)``: complaints about the configuration in the daemons' logs."""

    def find(folder: Path) -> list[str]:
        return [
            f"{log.name}: {line}"
            for log in sorted([*folder.glob("slurm*.log"), *folder.glob("munged.log")])
            for line in log.read_text().splitlines()
            if COMPLAINT.search(line)
            and not any(re.search(known, line) for known in NOT_ABOUT_THE_CONFIGURATION)
        ]

    return find
