"""The ways to start the ranks of a plan: sbatch, submitit, torchrun and this machine alone."""
