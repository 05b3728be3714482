"""The one way to ask Slurm: its commands, one parser of its records, the states of jobs and nodes."""
