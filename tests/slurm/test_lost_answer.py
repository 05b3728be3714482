"""A slurmctld that is stopped while a job is submitted: the job is accepted and its id found."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddp_slurm.lab import Lab

from .conftest import LIVE_CLUSTER, wait_for_job

STOPPED_SECONDS = 15
"""sbatch gives up after 10 s (MessageTimeout)."""


@pytest.mark.parametrize("backend", ["sbatch", "submitit"])
def test_a_submission_whose_answer_is_lost_is_found(
    live_lab: Lab, tmp_path: Path, clean_environ: dict[str, str], backend: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(LIVE_CLUSTER)
    command = [sys.executable, "-m", "ddp_slurm.submit", "--backend", backend, "--time", "5"]
    slurmctld = int((live_lab.folder / "state/slurmctld.pid").read_text())
    os.kill(slurmctld, signal.SIGSTOP)
    resume = threading.Timer(STOPPED_SECONDS, os.kill, (slurmctld, signal.SIGCONT))
    resume.start()
    try:
        done = subprocess.run(
            [*command, "--", "true"],
            env={**clean_environ, **live_lab.environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
    finally:
        resume.join()
    assert done.returncode == 0, done.stderr
    assert "Socket timed out on send/recv operation" in done.stderr
    assert wait_for_job(live_lab, int(done.stdout)) == "COMPLETED"
    assert (tmp_path / "ddp_slurm_runs" / done.stdout.strip() / "run.json").exists()
