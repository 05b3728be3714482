
# --- After the ranks have ended --------------------------------------------------------------

_ddp_end() {
  local fate early
  [[ $_ddp_ending == no ]] || exit 143
  if [[ -n $_ddp_marker && -e $_ddp_marker ]]; then
    early=$(<"$_ddp_marker") # empty, or what the ranks were doing
    early="stopped early ${early:-with a snapshot}"
    if [[ $_ddp_max_restarts -eq 0 ]]; then
      _ddp_say "$early; submit again to go on"
      exit 75
    fi
    _ddp_requeue_and_exit "$early" 75
  fi
  [[ $_ddp_status -ne 0 && $_ddp_max_restarts -gt 0 ]] || exit "$_ddp_status"
  fate=$(_ddp_fate)
  if [[ $fate == requeued ]]; then
    _ddp_requeue_left_behind
    _ddp_run_folder= # the job goes on: no exit marker
  elif [[ $fate == ended ]]; then
    _ddp_terminated=yes
  elif [[ $fate == preempted || $_ddp_soon == yes ]]; then
    _ddp_requeue_and_exit "preempted" "$_ddp_status"
  elif _ddp_srun_lost_a_node || _ddp_a_node_restarted; then
    _ddp_requeue_and_exit "a node was lost" "$_ddp_status"
  fi
  exit "$_ddp_status"
}
