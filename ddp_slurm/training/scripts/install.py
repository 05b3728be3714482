"""The changes to torch in a process that runs somebody's script on uneven shares."""

import os
from collections.abc import Mapping

from ddp_slurm.job_env import ADAPTIVE, MEASURED, JobEnv
from ddp_slurm.rank_env import RankEnv
from ddp_slurm.training.scripts import loaders, losses, modules, rates, recording
from ddp_slurm.training.scripts.errors import UnevenError
from ddp_slurm.training.scripts.modules import Modules


def install(environ: Mapping[str, str] = os.environ) -> Modules | None:
    """Let DataLoader and DistributedDataParallel divide and weight by shares, in this process.

    Returns the DDP modules that the script will make; None, with nothing changed, in a world of one
    rank. Raises UnevenError, LaunchError or JobEnvError.
    """
    world_size = RankEnv.from_environ(environ).world_size
    job_env = JobEnv.from_environ(environ)
    if world_size == 1 and job_env.verify is None:
        return None
    if job_env.balance in (MEASURED, ADAPTIVE):
        raise UnevenError(
            f"measured shares (--balance {job_env.balance}) need a model and data to measure with, "
            "before the script's own exist. Give the speeds in a file: --balance speeds.yaml"
        )
    ddp_modules = Modules(world_size)
    modules.install(ddp_modules)
    if job_env.verify is not None:
        recording.record(ddp_modules, job_env.verify)
        if world_size == 1:
            loaders.enlarge(job_env.verify.ranks)
    if world_size > 1:
        loaders.install(ddp_modules)
        losses.install(ddp_modules)
        rates.install(ddp_modules)
    return ddp_modules
