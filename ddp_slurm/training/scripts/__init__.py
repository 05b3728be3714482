"""Uneven shares for scripts that are not changed: ``python -m ddp_slurm.run --uneven CMD``."""
