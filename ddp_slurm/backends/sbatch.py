"""Submits a rendered script through the sbatch of this machine."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.slurm_client.commands import clean_environ


class SubmitError(DdpSlurmError):
    """Slurm did not take the job."""


def check_setup(lines: Sequence[str]) -> None:
    """Raises SubmitError, with bash's words, for setup lines that would end the job before it begins."""
    if not lines:
        return
    try:
        text = "\n".join(lines) + "\n"
        done = subprocess.run(["/bin/bash", "-n"], input=text, capture_output=True, text=True)
    except OSError:  # no bash here; there is one where the script runs
        return
    if done.returncode:
        words = " ".join(line.removeprefix("/bin/bash: ") for line in done.stderr.splitlines())
        raise SubmitError(f"--setup: bash cannot read these lines: {words}")


def is_available() -> bool:
    return shutil.which("sbatch") is not None


def submit(script: str) -> str:
    """Give the script to sbatch. Returns the job id; raises SubmitError with sbatch's own words."""
    if not is_available():
        raise SubmitError(
            "no sbatch on PATH: is this a login node of the cluster? Without Slurm use --backend local"
        )
    result = subprocess.run(
        ["sbatch", "--parsable"],
        input=script.encode(),
        capture_output=True,
        env=clean_environ(os.environ),
    )
    # not text=True: with errors="replace" the script would be changed as well
    out, err = (text.decode(errors="replace").strip() for text in (result.stdout, result.stderr))
    job_id = out.partition(";")[0]  # "48;cluster" where there are several clusters
    if result.returncode or not job_id.isdigit():
        raise SubmitError(f"sbatch refused the job: {err or out or 'no reason given'}")
    return job_id
