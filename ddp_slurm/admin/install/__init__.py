"""From bare machines to the first het job: the shell steps of cluster_setup/steps, by ssh.

A step looks first and changes only what is missing, so that everything may be run again at any
time, also after an interruption. The order matters: ids before packages, packages before the key,
the key before the daemons.
"""

from ddp_slurm.admin.install.first_job import first_job
from ddp_slurm.admin.install.run import install
from ddp_slurm.admin.install.steps import STEPS, InstallError, Outcome, Step, step_script

__all__ = ["STEPS", "InstallError", "Outcome", "Step", "first_job", "install", "step_script"]
