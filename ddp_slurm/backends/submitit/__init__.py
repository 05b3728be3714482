"""Jobs over uneven nodes from Python, through submitit.

Every rank loads this package, as submitit loads all its plug-ins: it imports little.
"""

from ddp_slurm.backends.submitit.executor import HetSlurmExecutor
from ddp_slurm.backends.submitit.job import HetSlurmJob
from ddp_slurm.backends.submitit.rank import HetSlurmJobEnvironment

__all__ = ["HetSlurmExecutor", "HetSlurmJob", "HetSlurmJobEnvironment"]
