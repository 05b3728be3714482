
# --- The loss of the first node --------------------------------------------------------------

# The first node takes this script with it. Slurm then puts the first component alone into the
# queue, and the others would keep their nodes idle. A small step on the first node of the second
# component looks now and then, and puts them into the queue as well.
_ddp_watch_first_component() {
  unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE
  unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NNODES SLURM_NODELIST SLURM_JOB_NODELIST
  unset SLURM_JOB_NUM_NODES SLURM_JOB_CPUS_PER_NODE SLURM_MEM_PER_NODE
  export -f _ddp_components _ddp_requeue_with_first_component
  # Slurm 20.11 starts this step beside the ranks' one, but no later step beside this one.
  if [[ $(srun --version) == *" 20."* ]]; then # "slurm 20.11.9", or Debian's "slurm-wlm 20.11.4"
    [[ $1 == srun ]] || return 0 # torchrun has a step for each attempt
    until squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -q '[.][0-9]'; do
      sleep 5
    done
  fi
  exec srun --het-group=1 --overlap --nodes=1 --ntasks=1 --cpus-per-task=1 --gres=none --mem=0 \
    --mpi=none bash -c _ddp_requeue_with_first_component
}

_ddp_requeue_with_first_component() {
  local id state
  while sleep 30; do
    read -r id state _ < <(_ddp_components) || continue
    # an error for the first component, which is in the queue already
    [[ $state != PENDING ]] || scontrol requeue "$SLURM_JOB_ID" || true
  done
}
