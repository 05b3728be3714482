"""Submits a rendered script through the sbatch of this machine."""

import os
import shutil
from collections.abc import Sequence

from ddp_slurm.ask import NOT_FOUND, ask
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.slurm_client.commands import clean_environ


class SubmitError(DdpSlurmError):
    """Slurm did not accept the job."""


def check_setup(lines: Sequence[str]) -> None:
    """Raises SubmitError, with bash's message, for setup lines that bash cannot parse.

    They would end the job before it begins.
    """
    if not lines:
        return
    text = "\n".join(lines) + "\n"
    answer = ask(["/bin/bash", "-n"], input=text.encode())
    if answer.status in (0, NOT_FOUND):  # a machine without bash: the script runs elsewhere
        return
    messages = [line.removeprefix("/bin/bash: ") for line in answer.err.splitlines()]
    raise SubmitError(f"--setup: bash cannot parse these lines: {' '.join(messages)}")


def is_available() -> bool:
    return shutil.which("sbatch") is not None


def submit(script: str) -> str:
    """Give the script to sbatch. Returns the job id; raises SubmitError with sbatch's message."""
    if not is_available():
        raise SubmitError(
            "no sbatch on PATH: is this a login node of the cluster? "
            "Without Slurm use --backend local"
        )
    environ = clean_environ(os.environ)
    answer = ask(["sbatch", "--parsable"], environ=environ, input=script.encode())
    job_id = answer.out.strip().partition(";")[0]  # "48;cluster" where there are several clusters
    if answer.status or not job_id.isdigit():
        raise SubmitError(f"sbatch refused the job: {answer.text or 'no reason given'}")
    return job_id
