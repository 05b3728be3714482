"""The one way to ask Slurm: its clients, one parser of its records, the states of jobs."""
