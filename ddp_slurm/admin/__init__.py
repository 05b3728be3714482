"""From bare machines to a running Slurm: probe, configs, install, doctor."""
