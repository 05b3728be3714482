
# --- What Slurm reports about this job -------------------------------------------------------

# A line for each component: its job id, its state, its restarts, when it was preempted (or N/A).
# From squeue, whose columns have no free text such as the name of the job.
_ddp_components() (
  unset "${!SQUEUE_@}"
  timeout 30 squeue --noheader --states=all --jobs="$SLURM_JOB_ID" \
    --Format=JobID:20,State:20,RestartCnt:10,PreemptTime:30
)

# Prints running, preempted, requeued or ended; nothing where squeue does not respond.
_ddp_fate() {
  local id state restarts preempted
  read -r id state restarts preempted < <(_ddp_components 2>/dev/null) || return 0
  if [[ $restarts -gt $_ddp_restarts ]]; then
    echo requeued
    return 0
  fi
  case $state in
    RUNNING | CONFIGURING | SUSPENDED | STOPPED | SIGNALING)
      [[ $preempted == N/A ]] && echo running || echo preempted
      ;;
    *) echo ended ;;
  esac
}
