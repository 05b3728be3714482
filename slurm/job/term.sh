
# --- SIGTERM: the job ends, or will be preempted soon ----------------------------------------

_ddp_step=       # process id of srun
_ddp_signalled=no
_ddp_soon=no     # the job goes on for now, but will be preempted, or its host shuts down
_ddp_ending=no   # the job was cancelled or requeued; only the end of srun is waited for

_ddp_on_term() {
  trap '' TERM # Slurm signals all processes of the script, and would end those that ask it
  _ddp_signalled=yes
  case $(_ddp_fate) in
    running | preempted)
      trap _ddp_on_term TERM
      _ddp_soon=yes
      # srun passes the signal on to the ranks
      [[ $_ddp_sends_signal == no || -z $_ddp_step ]] || kill -USR2 "$_ddp_step" || true
      return 0
      ;;
    requeued)
      _ddp_requeue_left_behind
      _ddp_run_folder= # the job goes on: no exit marker
      ;;
    *)
      _ddp_terminated=yes
      _ddp_leave_exit_marker 143 # now: SIGKILL may follow
      ;;
  esac
  [[ -n $_ddp_step ]] || exit 143
  _ddp_ending=yes
}
