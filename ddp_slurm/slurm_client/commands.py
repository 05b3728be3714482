"""The one way to run a client of Slurm: in a clean environment, with a limit."""

import os
import re
from collections.abc import Mapping, Sequence

from ddp_slurm.ask import Answer, ask

KEPT_VARIABLES = ("SLURM_CONF",)
ANSWER_SECONDS = 90
"""The limit of one call. A client gives up after about ten seconds for each controller by itself;
this is for one that hangs on a dead file system."""


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a surrounding Slurm job left in it.

    sbatch reads SLURM_* and SBATCH_* as options: submitted from inside a job, the outer one's sizes
    and gres would override the script's ("Invalid generic resource").
    """
    return _without(environ, "SLURM|SBATCH|SRUN|SALLOC")


def ask_slurm(argv: Sequence[str], *, timeout_seconds: float = ANSWER_SECONDS) -> Answer:
    """Run a client of Slurm; like ``ask``, it never raises."""
    return ask(argv, timeout_seconds=timeout_seconds, environ=client_environ())


def client_environ() -> dict[str, str]:
    """The clean environment of this process without what changes a client's output.

    Such as the user's own SQUEUE_FORMAT and SACCT_FORMAT.
    """
    return _without(clean_environ(os.environ), "SQUEUE|SACCT|SCONTROL|SINFO")


def _without(environ: Mapping[str, str], prefixes: str) -> dict[str, str]:
    removed = re.compile(f"({prefixes})_")
    return {
        name: value
        for name, value in environ.items()
        if name in KEPT_VARIABLES or not removed.match(name)
    }
