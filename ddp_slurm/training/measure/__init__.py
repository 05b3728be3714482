"""What ``ddp-slurm measure`` runs on the ranks: cards, links, and the file of speeds."""
