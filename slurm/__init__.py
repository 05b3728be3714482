"""Templates of everything that is rendered for Slurm; installed as ``ddp_slurm.templates``."""
