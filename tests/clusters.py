"""Descriptions of clusters that many tests share."""

UNEVEN = """\
name: lab
nodes:
  - name: gamma
    gpus: {type: titan, count: 1}
    cpus: 8
    memory: 30G
  - name: beta
    gpus: {type: v100, count: 2}
    cpus: 16
    memory: 60G
  - name: alpha
    gpus: {type: a100, count: 4}
    cpus: 32
    memory: 240G
"""
"""1, 2 and 4 GPUs, not in the order of names: rank 0 belongs on gamma, and Slurm's host lists begin
with alpha."""
