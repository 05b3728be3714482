"""Train one PyTorch model on all the GPUs you own, however uneven, under Slurm or without it.

Importing this package imports nothing else: a login node needs no torch, and a rank needs no YAML.
"""

__version__ = "0.1.0"
