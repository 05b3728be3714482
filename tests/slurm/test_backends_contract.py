"""The four backends start the same plan alike: the same ranks, environment and exit status."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_slurm.lab import Lab

BACKENDS = ("sbatch", "submitit", "torchrun", "local")
SCRIPT = Path(__file__).parents[1] / "scripts" / "reports_its_rank.py"
CLUSTER = """\
name: lab
nodes:
  - {name: gamma, address: 127.0.0.1, gpus: {type: titan, count: 1}, cpus: 8, memory: 30G}
  - name: beta
    address: 127.0.0.1
    gpus: {type: v100, count: 2}
    cpus: 16
    memory: 60G
    interface: eth7
    env: {SITE: "it's $HOME", BOTH: node}
  - {name: alpha, address: 127.0.0.1, gpus: {type: a100, count: 4}, cpus: 32, memory: 240G}
"""
"""The live lab's nodes; for torchrun all of them are this machine."""
RANKS = [
    # rank, local rank, local world size, node rank
    (0, 0, 1, 0),
    (1, 0, 2, 1),
    (2, 1, 2, 1),
    (3, 0, 4, 2),
    (4, 1, 4, 2),
    (5, 2, 4, 2),
    (6, 3, 4, 2),
]


@dataclass(frozen=True)
class Report:
    """How a job ended, and what its ranks found, in the order of ranks."""

    status: int
    output: str
    ranks: list[dict[str, Any]]

    def environ(self, rank: int, names: str) -> dict[str, str]:
        """Those of the named variables that the rank has."""
        environ: Mapping[str, str] = self.ranks[rank]["environ"]
        return {name: environ[name] for name in names.split() if name in environ}


@pytest.fixture(scope="module")
def run_backend(live_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Report]:
    """``run_backend(name)``: the plan, started once by each backend; its rank 4 exits with 3."""
    reports: dict[str, Report] = {}

    def run(backend: str) -> Report:
        if backend not in reports:
            reports[backend] = _run(backend, live_lab, tmp_path_factory.mktemp(backend))
        return reports[backend]

    return run


def _run(backend: str, lab: Lab, folder: Path) -> Report:
    (folder / "cluster.yaml").write_text(CLUSTER)
    command = [sys.executable, "-m", "ddp_slurm.submit", "--backend", backend]
    command += ["--global-batch-size", "20", "--balance", "equal", "--env", "WORDS=a 'b' $c"]
    command += ["--env", "BOTH=job"]
    if backend in ("sbatch", "submitit"):
        command += ["--time", "5", "--follow"]
    command += ["--", sys.executable, str(SCRIPT), str(folder)]
    # Without the variables of a GPU on this machine: it may have fewer than the plan.
    environ = {**os.environ, **lab.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    return Report(done.returncode, output, [json.loads(file.read_text()) for file in files])


@pytest.fixture(params=BACKENDS)
def report(request: pytest.FixtureRequest, run_backend: Callable[[str], Report]) -> Report:
    if request.param == "submitit":
        pytest.importorskip("submitit")
    if request.param == "torchrun":
        pytest.importorskip("torch")
    found = run_backend(request.param)
    assert len(found.ranks) == len(RANKS), found.output
    return found


def test_each_rank_has_its_place(report: Report) -> None:
    found = [rank["rank_env"] for rank in report.ranks]
    names = ("rank", "local_rank", "local_world_size", "node_rank")
    assert [tuple(env[name] for name in names) for env in found] == RANKS
    assert {env["world_size"] for env in found} == {7}
    assert [env["device_index"] for env in found] == [env["local_rank"] for env in found]
    masters = {(env["master_addr"], env["master_port"]) for env in found}
    assert len(masters) == 1
    assert masters.pop()[0] in ("gamma", "127.0.0.1")


def test_the_ranks_see_the_plan(report: Report) -> None:
    tokens = set()
    for rank in report.ranks:
        own = {k: v for k, v in rank["environ"].items() if k.startswith("DDP_SLURM_")}
        tokens.add(own.pop("DDP_SLURM_TOKEN"))
        assert own == {
            "DDP_SLURM_WORLD_SIZE": "7",
            "DDP_SLURM_TASKS_PER_NODE": "1,2,4",
            "DDP_SLURM_GLOBAL_BATCH_SIZE": "20",
            "DDP_SLURM_SHARES": "3(x6),2",
            "DDP_SLURM_BALANCE": "equal",
        }
    assert len(tokens) == 1


def test_the_ranks_have_the_jobs_and_the_nodes_variables(report: Report) -> None:
    names = "WORDS BOTH SITE PYTHONUNBUFFERED OMP_NUM_THREADS"
    common = {"WORDS": "a 'b' $c", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    for rank, (_, _, _, node_rank) in enumerate(RANKS):
        of_beta = {"SITE": "it's $HOME", "BOTH": "node"}
        own = of_beta if node_rank == 1 else {"BOTH": "job"}
        assert report.environ(rank, names) == {**common, **own}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ranks_use_the_nodes_interface(
    run_backend: Callable[[str], Report], backend: str
) -> None:
    report = run_backend(backend)
    names = "NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME"
    of_beta = {"NCCL_SOCKET_IFNAME": "=eth7", "GLOO_SOCKET_IFNAME": "eth7"}
    if backend == "local":  # this machine need not have the interfaces of the planned nodes
        of_beta = {}
    for rank, (_, _, _, node_rank) in enumerate(RANKS):
        assert report.environ(rank, names) == (of_beta if node_rank == 1 else {})


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_exit_status_is_the_failed_ranks(
    run_backend: Callable[[str], Report], backend: str
) -> None:
    report = run_backend(backend)
    # torchrun itself ends with 1, whatever the status of its rank.
    assert report.status == (1 if backend == "torchrun" else 3), report.output
