"""Scripts that do not use ddp_slurm, on 4, 2 and 1 ranks of a live Slurm."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.lab import Lab
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch

from .conftest import wait_for_job

RunJob = Callable[..., Any]
CLUSTER = """\
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}}
  - {name: beta, gpus: {type: v100, count: 2}}
  - {name: alpha, gpus: {type: a100, count: 4}}
"""
THREE_RANKS = CLUSTER[: CLUSTER.index("  - {name: alpha")]
"""For what all ranks take long to import."""
SCRIPTS = Path(__file__).parents[1] / "scripts"
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29467",
    "OMP_NUM_THREADS": "1",
}
LIMIT = "--time=10"  # minutes: seven times "import lightning" is slow on a busy machine
pytestmark = pytest.mark.timeout(900)


def script(tmp_path: Path, cluster: str = CLUSTER, **options: object) -> str:
    """The job script for the lab's 7 ranks, or those of another cluster."""
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster)
    return render_sbatch(
        make_plan(Cluster.load(file), JobOptions.read({"python": sys.executable, **options}))
    )


def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }  # torchrun leaves a folder for logs behind


def results(output: str) -> dict[int, str]:
    """What each rank reported besides its rank."""
    return {
        int(rank): rest.strip()
        for rank, rest in re.findall(r"RESULT rank=(\d+) ((?:\w+=[-.\d]+ ?)+)", output)
    }


@pytest.mark.parametrize(
    ("launcher", "words", "ranks"),
    [
        ("srun", ["plain_ddp.py"], 7),
        ("srun", ["accelerate_script.py"], 3),
        ("srun", ["lightning_script.py", "auto", "2"], 3),
        ("torchrun", ["accelerate_script.py"], 7),
        ("torchrun", ["lightning_script.py", "auto", "2"], 3),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_every_rank_is_in_one_world(
    live_lab: Lab, run_job: RunJob, tmp_path: Path, launcher: str, words: list[str], ranks: int
) -> None:
    through = ["-m", "ddp_slurm.run"] if launcher == "srun" else []
    command = ["python", *through, str(SCRIPTS / words[0]), *words[1:]]
    cluster = CLUSTER if ranks == 7 else THREE_RANKS
    text = script(tmp_path, cluster, command=command, launcher=launcher)
    job = run_job(live_lab, text, LIMIT, env=environ(tmp_path))
    found = results(job.output)
    assert job.state == "COMPLETED", job.output
    assert sorted(found) == list(range(ranks)), job.output
    assert len(set(found.values())) == 1, "the parameters differ: " + job.output
    answer = re.search(rf"world={ranks} samples={84 // ranks} weight=(\S+) bias=(\S+)", found[0])
    assert answer, found[0]
    assert float(answer[1]) == pytest.approx(3, abs=0.05)
    assert float(answer[2]) == pytest.approx(1, abs=0.05)


def test_uneven_script_trains_as_one_process(
    live_lab: Lab, run_job: RunJob, tmp_path: Path, clean_environ: dict[str, str]
) -> None:
    """``uneven: true`` through sbatch: shares 1, 2, 2 and 4 times 4 of a global batch of 49."""
    loop = [str(SCRIPTS / "uneven" / "plain.py")]
    data = ["200", "2"]  # samples; micro-batches of an optimizer step
    alone = subprocess.Popen(
        [sys.executable, "-m", "ddp_slurm.run", *loop, "49", *data],
        env={**clean_environ, **ALONE},
        stdout=subprocess.PIPE,
        text=True,
    )
    text = script(
        tmp_path,
        command=["python", *loop, "7", *data],
        uneven="true",
        global_batch_size="49",
        balance="titan=1,v100=2,a100=4",
    )
    job = run_job(live_lab, text, LIMIT, env=environ(tmp_path))
    _, expected = loop_results(alone.communicate()[0])[0]
    found = loop_results(job.output)
    assert job.state == "COMPLETED", job.output
    assert sorted(found) == list(range(7)), job.output
    # each sample once an epoch, and two stand-ins of three ranks without any of the last four
    assert sum(seen for seen, _ in found.values()) == 4 * (200 + 3 * 2)
    assert found[6][0] > 1.5 * found[1][0] > 2 * found[0][0]
    for _, numbers in found.values():
        assert numbers == pytest.approx(expected[: len(numbers)], abs=1e-6)


def loop_results(output: str) -> dict[int, tuple[int, list[float]]]:
    """By rank the samples seen, and the first parameters: srun --label breaks lines of 1 KiB."""
    return {
        int(rank): (int(seen), [float(number) for number in numbers.split(", ")])
        for rank, seen, numbers in re.findall(
            r'RESULT {"rank": (\d+), "steps": 12, "seen": (\d+), "model": \[(.*),', output
        )
    }


def test_lightnings_own_slurm_environment_fails(
    live_lab: Lab, run_job: RunJob, tmp_path: Path
) -> None:
    """It reads another component's SLURM_NTASKS_PER_NODE as its own."""
    job = run_job(
        live_lab,
        script(
            tmp_path,
            THREE_RANKS,
            command=["python", str(SCRIPTS / "lightning_script.py"), "auto", "2"],
        ),
        LIMIT,
        env=environ(tmp_path),
    )
    assert job.state == "FAILED"
    assert not results(job.output)
    assert "configured in SLURM" in job.output


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_restarts_all_nodes_when_a_rank_fails(
    live_lab: Lab, run_job: RunJob, tmp_path: Path, restarts: int
) -> None:
    text = script(
        tmp_path,
        command=["python", str(SCRIPTS / "fails_once.py"), str(tmp_path / "failed")],
        launcher="torchrun",
        max_restarts=restarts,
    )
    job = run_job(live_lab, text, LIMIT, env=environ(tmp_path))
    assert "rank 5 fails" in job.output
    if restarts:
        assert results(job.output) == dict.fromkeys(range(7), "attempt=2 total=49"), job.output
    assert job.state == ("COMPLETED" if restarts else "FAILED"), job.output


def test_signal_before_the_limit_reaches_ranks_of_torchrun(live_lab: Lab, tmp_path: Path) -> None:
    text = script(
        tmp_path,
        command=["python", str(SCRIPTS / "stops_when_asked.py"), str(tmp_path)],
        launcher="torchrun",
        time="10",
        signal_seconds=60,
        output=str(tmp_path / "log"),
    )
    environ_ = {**os.environ, **environ(tmp_path)}
    submitted = live_lab.run(
        ["sbatch", "--parsable"],
        input=text,
        env=environ_,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    job_id = submitted.stdout.strip()
    while len(list(tmp_path.glob("running*"))) < 7:
        time.sleep(0.05)
    live_lab.run(["scancel", "--signal=USR2", job_id], check=True)
    while "stopped early with a snapshot" not in (log := (tmp_path / "log").read_text()):
        time.sleep(0.05)
    wait_for_job(live_lab, int(job_id))  # the next test finds idle nodes
    assert sorted(re.findall(r"rank (\d) stops", log)) == list("0123456")
    assert "User defined signal" not in log, "torchrun died of it, and Slurm kills the ranks then"
