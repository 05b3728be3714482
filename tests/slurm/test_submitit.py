"""submitit over uneven nodes on live Slurm without accounting: results by rank, deaths, requeue."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

submitit = pytest.importorskip("submitit")
cloudpickle = pytest.importorskip("cloudpickle")

from submitit.core import utils  # noqa: E402
from submitit.helpers import (  # noqa: E402
    Checkpointable,
    DelayedSubmission,
    TorchDistributedEnvironment,
)

from ddp_slurm.backends.submitit.executor import HetSlurmExecutor, HetSlurmJob  # noqa: E402
from ddp_slurm.backends.submitit.job import StateWatcher  # noqa: E402
from ddp_slurm.lab import Lab  # noqa: E402

from ..waiting import wait_until  # noqa: E402
from .conftest import LIVE_CLUSTER, job_states, load_cluster, wait_for_job  # noqa: E402
from .test_restarts import URGENT, configure  # noqa: E402

# the nodes do not have this file on their path
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(600)

HOSTS = ["gamma", "beta", "beta", "alpha", "alpha", "alpha", "alpha"]


@pytest.fixture
def executor_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environ: dict[str, str]
) -> Callable[[Lab], HetSlurmExecutor]:
    def make(lab: Lab) -> HetSlurmExecutor:
        for name in set(os.environ) - set(clean_environ):
            monkeypatch.delenv(name)
        for name, value in lab.environ.items():
            monkeypatch.setenv(name, value)
        # the jobs of other labs in this process have the same ids
        monkeypatch.setattr(HetSlurmJob, "watcher", StateWatcher())
        return _executor(tmp_path)

    return make


@pytest.fixture(scope="module")
def submitit_lab(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose Slurm waits 3 s, not 30, for ranks that ignore SIGTERM, as submitit's do."""
    cluster = load_cluster(LIVE_CLUSTER, tmp_path_factory.mktemp("submitit_lab"))
    with Lab.up(cluster, f"test-{os.getpid()}-submitit") as lab:
        with lab.slurm_conf.open("a") as file:
            file.write("KillWait=3\n")
        lab.run(["scontrol", "reconfigure"], check=True)
        yield lab


@pytest.fixture
def executor(submitit_lab: Lab, executor_in: Callable[[Lab], HetSlurmExecutor]) -> HetSlurmExecutor:
    return executor_in(submitit_lab)


def _executor(tmp_path: Path) -> HetSlurmExecutor:
    (tmp_path / "cluster.yaml").write_text(LIVE_CLUSTER)
    executor = HetSlurmExecutor(tmp_path / "a folder", tmp_path / "cluster.yaml")
    executor.update_parameters(time=5, env={"OMP_NUM_THREADS": 1})
    return executor


def stay() -> None:
    while True:
        signal.pause()


def my_place(greeting: str) -> dict[str, Any]:
    env, torch_env = submitit.JobEnvironment(), TorchDistributedEnvironment()
    print(f"{greeting} from {env.global_rank}", flush=True)
    return {
        "host": socket.gethostname(),
        "rank": env.global_rank,
        "local_rank": env.local_rank,
        "node": env.node,
        "hostnames": env.hostnames,
        "world": env.num_tasks,
        "local_world": env.local_world_size,
        "master": (env.master_addr, env.master_port),
        "torch": (
            torch_env.master_addr,
            torch_env.rank,
            torch_env.world_size,
            torch_env.local_rank,
            torch_env.local_world_size,
        ),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def test_results_of_seven_ranks(executor: HetSlurmExecutor) -> None:
    job = executor.submit(my_place, greeting="hello")
    results = job.results()
    assert [(r["rank"], r["host"]) for r in results] == list(enumerate(HOSTS))
    assert [(r["node"], r["local_rank"], r["local_world"]) for r in results] == [
        (0, 0, 1),
        (1, 0, 2),
        (1, 1, 2),
        (2, 0, 4),
        (2, 1, 4),
        (2, 2, 4),
        (2, 3, 4),
    ]
    assert {(r["world"], *r["hostnames"], r["master"][0]) for r in results} == {
        (7, "gamma", "beta", "alpha", "gamma")
    }
    assert len({r["master"] for r in results}) == 1
    assert [r["torch"] for r in results] == [
        ("gamma", r["rank"], 7, r["local_rank"], r["local_world"]) for r in results
    ]
    assert [r["gpus"] for r in results] == ["0", "0,1", "0,1", *["0,1,2,3"] * 4]
    assert "hello from 5\n" in job.task(5).stdout()
    assert "hello from 4\n" not in job.task(5).stdout()
    assert isinstance(job, HetSlurmJob)
    assert job.run is not None
    assert job.run.plan["world_size"] == 7


def fails_on_rank_4() -> None:
    if submitit.JobEnvironment().global_rank == 4:
        raise ValueError("the error of rank 4")
    stay()


def test_an_exception_reaches_the_caller_with_traceback_and_host(
    executor: HetSlurmExecutor,
) -> None:
    job = executor.submit(fails_on_rank_4)
    with pytest.raises(
        utils.FailedJobError, match=r"rank 4 on alpha failed; job [0-9]+ is FAILED"
    ) as caught:
        job.results()
    assert "in fails_on_rank_4" in str(caught.value)
    assert "ValueError: the error of rank 4" in str(caught.value)


def exits_on_rank_4() -> None:
    if submitit.JobEnvironment().global_rank == 4:
        os._exit(3)
    stay()


def test_a_rank_that_exits(executor: HetSlurmExecutor) -> None:
    job = executor.submit(exits_on_rank_4)
    with pytest.raises(
        utils.UncompletedJobError, match=r"is FAILED .*ranks 0, 1, 2, 3, 4, 5, 6 left no result"
    ):
        job.results()
    assert "alpha: task 1: Exited with exit code 3" in (job.stdout() or "")
    assert job.state == "FAILED"


def grows_on_rank_4(folder: Path) -> None:
    if submitit.JobEnvironment().global_rank == 4:
        (folder / "pid.new").write_text(str(os.getpid()))
        (folder / "pid.new").rename(folder / "pid")
        while not (folder / "limited").exists():
            time.sleep(0.05)
        for _ in range(100):
            memory.append(b"x" * 10_000_000)
    stay()


memory: list[bytes] = []


@pytest.fixture
def memory_limit() -> Iterator[Callable[[int], None]]:
    """Puts a process under a limit of 200 MB, for the kernel to kill it when it grows."""
    parent = (
        Path("/sys/fs/cgroup/memory")
        if Path("/sys/fs/cgroup/memory").is_dir()
        else Path("/sys/fs/cgroup")
    )
    group = parent / f"ddp-slurm-test-{os.getpid()}"
    version_1 = parent.name == "memory"
    limit = "memory.limit_in_bytes" if version_1 else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip(f"cgroups without a memory limit: no {group / limit}")

        def apply(pid: int) -> None:
            (group / limit).write_text("200000000")
            (group / "cgroup.procs").write_text(str(pid))

        yield apply
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.05)
        group.rmdir()


def test_an_out_of_memory_kill(
    executor: HetSlurmExecutor, tmp_path: Path, memory_limit: Callable[[int], None]
) -> None:
    job = executor.submit(grows_on_rank_4, tmp_path)
    while not (tmp_path / "pid").exists():
        assert not job.done()
        time.sleep(0.1)
    memory_limit(int((tmp_path / "pid").read_text()))
    (tmp_path / "limited").touch()
    with pytest.raises(utils.UncompletedJobError, match=r"is FAILED .*left no result"):
        job.results()
    assert "task 1: Killed" in (job.stdout() or "")


def stays() -> None:
    print("up", flush=True)
    stay()


def test_scancel(executor: HetSlurmExecutor) -> None:
    job = executor.submit(stays)
    while "up" not in (job.stdout() or ""):
        assert not job.done()
        time.sleep(0.1)
    job.cancel()
    assert "is CANCELLED" in str(job.exception())
    assert job.state == "CANCELLED"
    listed = subprocess.run(
        ["squeue", "-h", "-j", job.job_id, "-t", "RUNNING,PENDING"], capture_output=True, text=True
    )
    assert listed.stdout == ""


class Counts(Checkpointable):  # type: ignore[misc]
    """Waits for its signal in the first start, and returns in the second the state it was given."""

    def __init__(self, folder: Path, starts: int = 0) -> None:
        self.folder, self.starts = folder, starts

    def __call__(self) -> tuple[int, int, str | None]:
        rank = submitit.JobEnvironment().global_rank
        with open(self.folder / f"rank{rank}", "a") as file:
            file.write("x")
        while not self.starts:
            signal.pause()
        return rank, self.starts, os.environ.get("SLURM_RESTART_COUNT")

    def checkpoint(self) -> "DelayedSubmission":
        return DelayedSubmission(Counts(self.folder, self.starts + 1))


def test_checkpoint_and_requeue_once(executor: HetSlurmExecutor, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.mkdir()
    job = executor.submit(Counts(starts))
    while len(list(starts.iterdir())) < 7:
        assert not job.done()
        time.sleep(0.1)
    subprocess.run(["scancel", "--signal=USR2", job.job_id], check=True)
    assert job.results() == [(rank, 1, "1") for rank in range(7)]
    assert [(starts / f"rank{rank}").read_text() for rank in range(7)] == ["xx"] * 7
    assert "Requeued job" in (job.task(0).stdout() or "")


def test_a_preempted_job_goes_on_from_its_checkpoint(
    make_lab: Callable[..., Lab], executor_in: Callable[[Lab], HetSlurmExecutor], tmp_path: Path
) -> None:
    """Slurm sends SIGTERM alone, and requeues the job itself only after the grace time."""
    lab = make_lab(LIVE_CLUSTER)
    grace = {"^(PartitionName=all .*)": r"\1 PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE"}
    configure(lab, grace, URGENT)
    executor = executor_in(lab)
    executor.update_parameters(time=30, max_restarts=1)
    starts = tmp_path / "starts"
    starts.mkdir()
    job = executor.submit(Counts(starts))
    wait_until(lambda: len(list(starts.iterdir())) == 7, "all ranks", seconds=300)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodelist=alpha", "--exclusive"]
    options = ["--time=1", "--output=/dev/null", "--wrap=true"]
    submitted = lab.run([*urgent, *options], check=True, capture_output=True, text=True)
    own = int(job.job_id)
    wait_until(lambda: set(job_states(lab, own)) == {"PENDING"}, "the requeue", seconds=120)
    # Else Slurm may start it before the urgent job, which then preempts it once more.
    lab.run(["scontrol", "hold", str(own)], check=True)
    wait_for_job(lab, int(submitted.stdout))
    lab.run(["scontrol", "release", str(own)], check=True)
    assert job.results() == [(rank, 1, "1") for rank in range(7)]
    assert [(starts / f"rank{rank}").read_text() for rank in range(7)] == ["xx"] * 7
    assert "Requeued job" in (job.task(0).stdout() or "")


def test_a_batch_of_jobs(executor: HetSlurmExecutor) -> None:
    executor.update_parameters(gpus=2)
    with executor.batch():
        jobs = [executor.submit(max, n, 1) for n in range(3)]
    assert [job.results() for job in jobs] == [[1, 1], [1, 1], [2, 2]]
    assert len({job.job_id for job in jobs}) == 3


def test_from_the_command_line(executor: HetSlurmExecutor, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ddp_slurm.submit",
        "--backend",
        "submitit",
        "--time",
        "5",
        "--gpus",
        "3",
        "--follow",
        "--",
    ]
    code = "import os, sys; rank = os.environ['SLURM_PROCID']; print('rank', rank); "
    code += "sys.exit(3 * (rank == sys.argv[1]))"
    good, bad = (
        subprocess.run(
            [*command, sys.executable, "-c", code, failing],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        for failing in ("none", "2")
    )
    assert good.returncode == 0, good.stderr
    job = HetSlurmJob(tmp_path / "ddp_slurm_runs" / "%j", good.stdout.strip(), range(3))
    assert job.results() == [0, 0, 0]
    assert "2: rank 2\n" in good.stderr
    assert bad.returncode != 0
    failed = HetSlurmJob(tmp_path / "ddp_slurm_runs" / "%j", bad.stdout.strip(), range(3))
    assert "rank 2 on beta failed" in str(failed.exception())
    assert "returned non-zero exit status 3" in str(failed.exception())
