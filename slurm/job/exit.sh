
# --- How the script ends ---------------------------------------------------------------------

_ddp_run_folder=     # for the exit marker; empty: none is written
_ddp_stage=          # what the script does, where a failure of it may print nothing
_ddp_failed_command= # with its line and file
_ddp_terminated=no   # the job was cancelled, or its time is up

_ddp_say() {
  echo "job script: $1" >&2
}

# The exit marker keeps how this job ended after Slurm has forgotten it. Where it cannot be written,
# the last line of the log keeps the same.
_ddp_leave_exit_marker() {
  local new=$_ddp_run_folder/.exit now lines
  [[ -n $_ddp_run_folder ]] || return 0
  now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
  lines=("status=$1" "terminated=$_ddp_terminated" "ended=$now" "host=${SLURMD_NODENAME:-}"
    "restarts=$_ddp_restarts")
  if ! printf '%s\n' "${lines[@]}" 1<>"$new" || ! mv -f -- "$new" "$_ddp_run_folder/exit"; then
    _ddp_say "no exit marker in $_ddp_run_folder: ${lines[*]}"
  fi
}

_ddp_open_run_folder() {
  local place=$_ddp_runs_folder
  [[ -n $place ]] || return 0
  # In a folder of several users another one may have put a link or a folder there.
  if [[ -L $place || (-e $place && ! -O $place) ]]; then
    _ddp_say "$place is not used: it is a link, or belongs to another user"
    return 0
  fi
  _ddp_run_folder=$place/$SLURM_JOB_ID
  (umask 022 && mkdir -p -- "$_ddp_run_folder") || return 0
  rm -f -- "$_ddp_run_folder/exit" "$_ddp_run_folder/state.json"
  # Space for the exit marker: the disk may be full at the end. It also shows that the job began.
  (umask 022 && printf '%254s\n' '' >"$_ddp_run_folder/.exit") || true
}

_ddp_on_exit() {
  local status=$? command=$BASH_COMMAND
  # A subshell that gets SIGTERM before bash has reset its traps would leave a marker, too.
  [[ $BASHPID -eq $$ ]] || return 0
  if [[ $status -ne 0 && -n $_ddp_stage ]]; then
    _ddp_say "$_ddp_stage: exit status $status of: ${_ddp_failed_command:-$command}"
  fi
  _ddp_leave_exit_marker "$status"
  # Not SIGTERM: srun would wait for its step, and half a minute later end the one of its number.
  [[ -z ${_ddp_watch:-} ]] || kill -KILL "$_ddp_watch" 2>/dev/null || true
  [[ -z $_ddp_marker ]] || rm -rf -- "${_ddp_marker%/*}"
}
