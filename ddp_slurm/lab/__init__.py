"""A real Slurm of several hosts on one machine: try a cluster.yaml before the machines are there, and test.

Needs root, Linux network namespaces and the packages of Slurm and munge; see docs/lab.md.
"""

from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.lab import Lab, LabNode

__all__ = ["Lab", "LabError", "LabNode"]
