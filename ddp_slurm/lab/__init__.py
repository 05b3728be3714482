"""A real Slurm of several hosts on one machine: to try a cluster.yaml before the machines exist.

Needs root, Linux network namespaces and the packages of Slurm and munge; see docs/lab.md.
"""

from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.lab import Lab
from ddp_slurm.lab.layout import LabNode

__all__ = ["Lab", "LabError", "LabNode"]
