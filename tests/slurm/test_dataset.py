"""A job whose nodes fetch a data set before its ranks begin, on live daemons."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_slurm.lab import Lab
from ddp_slurm.lab.network import MACHINE_HOST, NETWORKS
from tests.clusters import UNEVEN
from tests.data_sets import TOKEN, WRONG_TOKEN, DataServer, make_data_set
from tests.processes import catches, running_module
from tests.waiting import wait_until

from .conftest import wait_for_job

TASK = 'cd "$DDP_SLURM_DATA"; echo "$(ls train | wc -l) files, token ${DDP_SLURM_DATA_TOKEN:-gone}"'


@pytest.fixture(scope="module")
def served(live_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataServer]:
    folder = tmp_path_factory.mktemp("served") / "set"
    make_data_set(folder)
    with DataServer(folder, f"{NETWORKS[live_lab.network]}.{MACHINE_HOST}") as server:
        yield server
        assert server.stop() == 0


def submit(
    lab: Lab, server: DataServer, folder: Path, token: str, *words: str
) -> "subprocess.CompletedProcess[str]":
    (folder / "cluster.yaml").write_text(UNEVEN)
    options = ["--time", "5", "--python", sys.executable, *words]
    options += ["--dataset", server.url, "--dataset-cache", str(folder / "cache")]
    environ = {**os.environ, **lab.environ, "DDP_SLURM_DATA_TOKEN": token}
    return subprocess.run(
        [sys.executable, "-m", "ddp_slurm.submit", *options, "--", "sh", "-c", TASK],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_ranks_of_a_job_begin_with_the_data(
    live_lab: Lab, served: DataServer, tmp_path: Path
) -> None:
    done = submit(live_lab, served, tmp_path, TOKEN, "--follow")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": 2 files, token gone") == 7, done.stderr
    # the nodes of the lab share this machine's disk, and so its lock
    assert done.stderr.count("data set: complete after") == 1


def test_a_failed_fetch_ends_the_job_with_its_reason(
    live_lab: Lab, served: DataServer, tmp_path: Path
) -> None:
    done = submit(live_lab, served, tmp_path, WRONG_TOKEN, "--follow")
    assert done.returncode != 0
    assert " files, token" not in done.stderr
    assert "the server refuses the token of this node" in done.stderr, done.stderr


def test_a_stop_during_the_fetch_requeues_the_job(
    live_lab: Lab, served: DataServer, tmp_path: Path
) -> None:
    served.process.send_signal(signal.SIGSTOP)  # the fetch lasts
    try:
        words = ["--max-restarts", "1", "--signal-seconds", "60", "--output", "log"]
        done = submit(live_lab, served, tmp_path, TOKEN, *words)
        assert done.returncode == 0, done.stderr

        def all_fetch() -> bool:
            ranks = running_module("ddp_slurm.data.node", str(tmp_path / "cache"))
            return sum(catches(signal.SIGUSR2, pid) for pid in ranks) == 7

        wait_until(all_fetch, "the ranks", seconds=100)
        live_lab.run(["scancel", "--signal=USR2", done.stdout.strip()], check=True)
        log = tmp_path / "log"
        wait_until(lambda: "requeued (1 of 1)" in log.read_text(), log.read_text, seconds=60)
    finally:
        served.process.send_signal(signal.SIGCONT)
    assert wait_for_job(live_lab, int(done.stdout)) == "COMPLETED", log.read_text()
    assert "stopped early during the fetch of its data set; requeued" in log.read_text()
    assert log.read_text().count(": 2 files, token gone") == 7
