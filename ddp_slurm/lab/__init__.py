"""A real Slurm of several hosts on one machine: try a cluster.yaml before the machines are there, and test.

Needs root, Linux network namespaces and the packages of Slurm and munge; see docs/lab.md.
"""

from .errors import LabError
from .lab import Lab, LabNode

__all__ = ["Lab", "LabError", "LabNode"]
