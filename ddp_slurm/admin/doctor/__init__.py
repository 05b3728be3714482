"""``ddp-slurm doctor``: what is wrong with the machines and their Slurm, why, and what to do."""
