
# --- Restarts --------------------------------------------------------------------------------

# Puts all components back into the queue. slurmctld may be away for minutes: it is asked again.
_ddp_requeue() {
  local answer give_up=$((SECONDS + 600))
  trap '' TERM # which Slurm sends once it has accepted
  until answer=$(timeout 60 scontrol requeue "$SLURM_JOB_ID" 2>&1); do
    [[ $? -ne 127 ]] || give_up=0 # this node has no scontrol
    [[ $(_ddp_fate) != requeued ]] || break # accepted, but the answer was lost
    if [[ $SECONDS -ge $give_up || $answer == *@(disabled|denied|Invalid)* ]]; then
      _ddp_say "not requeued: $answer"
      return 1
    fi
    sleep 5 || true
  done
}

# REASON STATUS: ends the script, with STATUS where the job is not requeued.
_ddp_requeue_and_exit() {
  if [[ $_ddp_restarts -ge $_ddp_max_restarts ]]; then
    _ddp_say "$1; all $_ddp_max_restarts restarts are used up"
  elif _ddp_requeue; then
    _ddp_say "$1; requeued ($((_ddp_restarts + 1)) of $_ddp_max_restarts)"
    _ddp_run_folder= # the job goes on: no exit marker
    exit 0
  fi
  exit "$2"
}

# A job that was requeued within the grace time of a preemption is requeued by Slurm 24.11 once more,
# when it has ended well.
_ddp_end_where_all_is_done() {
  local marker=$_ddp_runs_folder/$SLURM_JOB_ID/exit
  [[ -n $_ddp_runs_folder && $_ddp_restarts -gt 1 && -O $marker ]] || return 0
  grep -qx 'status=0' "$marker" || return 0
  grep -qx "restarts=$((_ddp_restarts - 1))" "$marker" || return 0
  _ddp_say "the job has ended well before this restart; to run it again, submit it again"
  exit 0
}

# When a node is lost, Slurm requeues the first component and those with that node. The others would
# end as failed, together with this script: they have to be requeued before that.
_ddp_requeue_left_behind() {
  local id state restarts preempted
  while read -r id state restarts preempted; do
    if [[ $restarts -le $_ddp_restarts ]]; then
      # an error for each component that is pending already
      timeout 20 scontrol requeue "$SLURM_JOB_ID" >/dev/null 2>&1 || true
      return 0
    fi
  done < <(_ddp_components)
}

# When the first node was lost, Slurm starts the first component again while the others still run
# their old steps, with which the new step would be a duplicate, or after they have ended.
_ddp_wait_for_components() {
  local components ids steps give_up=$((SECONDS + 300))
  [[ $_ddp_restarts -gt 0 && $_ddp_component_count -gt 1 ]] || return 0
  while [[ $SECONDS -lt $give_up ]]; do
    if components=$(_ddp_components); then
      if grep -qvE ' (RUNNING|CONFIGURING|COMPLETING) ' <<<"$components"; then
        _ddp_requeue_and_exit "a component of the job does not run" 75
      fi
      ids=$(cut -d ' ' -f 1 <<<"$components" | paste -s -d ,)
      steps=$(squeue --noheader --steps --jobs="$ids" --format=%i | grep '[.][0-9]*$' || true)
      [[ -n $steps || $components == *COMPLETING* ]] || return 0
      # shellcheck disable=SC2086 # one word a step
      [[ -z $steps ]] || scancel $steps || true
    fi
    sleep 3 || true # a signal to all processes of the script ends it
  done
  _ddp_requeue_and_exit "old steps of the job do not end" 75
}

# Whether the slurmd of a node has started after this script: a node that restarts quickly is never
# DOWN for Slurm, and srun may not see that its tasks are gone.
_ddp_a_node_restarted() {
  local group nodes list=${SLURM_JOB_NODELIST:-} time
  for ((group = 1; group < _ddp_component_count; group++)); do
    nodes=SLURM_JOB_NODELIST_HET_GROUP_$group
    list+=,${!nodes:-}
  done
  while read -r time; do
    [[ ! ${time#*=} > $_ddp_started ]] || return 0
  done < <(
    unset SLURM_TIME_FORMAT
    timeout 30 scontrol --oneliner show node "$list" | grep -o 'SlurmdStartTime=[0-9T:-]*'
  )
  return 1
}
