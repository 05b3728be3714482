"""A slurmctld that is stopped while a job is submitted: the job is accepted and its id found."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm.lab import Lab

from .conftest import LIVE_CLUSTER, wait_for_job


@pytest.mark.parametrize("backend", ["sbatch", "submitit"])
def test_a_submission_whose_answer_is_lost_is_found(
    live_lab: Lab, tmp_path: Path, clean_environ: dict[str, str], backend: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(LIVE_CLUSTER)
    command = [sys.executable, "-m", "ddp_slurm.submit", "--backend", backend, "--time", "5"]
    slurmctld = int((live_lab.folder / "state/slurmctld.pid").read_text())
    path = _stop_during_sbatch(tmp_path / "bin", slurmctld)
    try:
        done = subprocess.run(
            [*command, "--", "true"],
            env={**clean_environ, **live_lab.environ, "PATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
    finally:
        os.kill(slurmctld, signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    assert "Socket timed out on send/recv operation" in done.stderr
    assert wait_for_job(live_lab, int(done.stdout)) == "COMPLETED"
    assert (tmp_path / "ddp_slurm_runs" / done.stdout.strip() / "run.json").exists()


def _stop_during_sbatch(folder: Path, slurmctld: int) -> str:
    """A PATH whose sbatch is the real one, with slurmctld stopped from its start to its end."""
    folder.mkdir()
    sbatch = folder / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\n"
        f"kill -STOP {slurmctld}\n"
        f'{shutil.which("sbatch")} "$@"\n'
        "status=$?\n"
        f"kill -CONT {slurmctld}\n"
        'exit "$status"\n'
    )
    sbatch.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
