
# --- SIGTERM, and the end --------------------------------------------------------------------

_ddp_step=       # process id of srun
_ddp_signalled=no
_ddp_ending=no   # only the end of srun is waited for

# The job was cancelled, or its time is up.
_ddp_on_term() {
  trap '' TERM # Slurm signals all processes of the script
  _ddp_signalled=yes
  _ddp_terminated=yes
  _ddp_leave_exit_marker 143 # now: SIGKILL may follow
  [[ -n $_ddp_step ]] || exit 143
  _ddp_ending=yes
}

_ddp_end() {
  [[ $_ddp_ending == no ]] || exit 143
  exit "$_ddp_status"
}
