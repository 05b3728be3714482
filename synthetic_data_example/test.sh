#!/bin/bash
# 7 ranks on 3 nodes of cluster lab. Made by ddp-slurm submit; to change it, edit cluster.yaml and submit again.
# shellcheck disable=SC2016 # a $ in a value stands for itself
#SBATCH --job-name=synthetic
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --nodelist=gamma
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:titan:1
#SBATCH --mem=30G
#SBATCH --time=10
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --nodelist=beta
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:v100:2
#SBATCH --mem=60G
#SBATCH --time=10
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --nodelist=alpha
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=240G
#SBATCH --time=10

set -euo pipefail
# This script's own variables begin with _ddp_: --env and --setup may set any other.

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "$0: this is a job script; start it with: sbatch $0" >&2
  exit 2
fi
# Slurm before 20.02 and a plain 'bash' inside a job do not have components.
if [[ ${SLURM_HET_SIZE:-0} -ne 3 ]]; then
  echo "$0: expected 3 components, got ${SLURM_HET_SIZE:-none}; was the script changed?" >&2
  exit 2
fi

export PYTHONUNBUFFERED=1
# As torchrun does: with a thread for every core of the node in each rank, the ranks wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export DDP_SLURM_WORLD_SIZE=7
export DDP_SLURM_TASKS_PER_NODE=1,2,4
export DDP_SLURM_GLOBAL_BATCH_SIZE=256
export DDP_SLURM_SHARES='37(x4),36(x3)'
export DDP_SLURM_BALANCE=equal

_ddp_command=(python train.py 5 1)

# srun takes the batch shell's own sizes, those of component 0, as the default of every segment: Slurm 24.11
# and 26.05 then refuse the step, 20.11 starts component 0 alone. Without them and with each segment's own
# sizes the step is one world on all releases from 20.11 on.
_ddp_status=0
(
  unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK \
    SLURM_NNODES SLURM_NODELIST SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_CPUS_PER_NODE SLURM_MEM_PER_NODE
  # --kill-on-bad-exit: one dead rank ends the others at once, or they hold their GPUs until a time-out.
  exec srun --label --kill-on-bad-exit=1 \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8 \
    "${_ddp_command[@]}" : \
    --nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=8 \
    "${_ddp_command[@]}" : \
    --nodes=1 --ntasks=4 --ntasks-per-node=4 --cpus-per-task=8 \
    "${_ddp_command[@]}"
) || _ddp_status=$?
exit "$_ddp_status"
