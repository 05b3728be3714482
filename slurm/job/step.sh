
# --- The step that runs the ranks ------------------------------------------------------------

_ddp_status=0              # of srun
_ddp_log=/proc/$$/fd/2     # the job's log, unless standard error is no file
_ddp_log_start=1           # where the output of this step begins

# PID: waits for srun in a way that lets bash react to SIGTERM at once. Sets _ddp_status.
_ddp_wait_for_step() {
  local watcher=
  _ddp_step=$1
  # A watcher that begins while SIGTERM is ignored could not be stopped.
  if [[ -f $_ddp_log && $_ddp_ending == no ]]; then
    _ddp_watch_srun "$1" >/dev/null 2>&1 &
    watcher=$!
  fi
  while :; do
    _ddp_signalled=no
    _ddp_status=0
    wait "$_ddp_step" || _ddp_status=$?
    [[ $_ddp_signalled == yes ]] || break
    # bash may miss the end of a process during a trap: the next wait would last as long as any
    # other child. At the end of the script the status is of no use.
    if [[ $_ddp_ending == yes ]]; then
      while kill -0 "$_ddp_step" 2>/dev/null; do sleep 0.2 || true; done
      break
    fi
  done
  [[ -z $watcher ]] || kill "$watcher" 2>/dev/null || true
  _ddp_step=
}

_ddp_note_log_size() {
  [[ ! -f $_ddp_log ]] || _ddp_log_start=$(($(stat --dereference --format=%s "$_ddp_log") + 1))
}

# The messages of srun in the last 16 MB of what this step has written.
_ddp_srun_errors() {
  local first
  [[ -f $_ddp_log ]] || return 0
  first=$(($(stat --dereference --format=%s "$_ddp_log") - 16000000))
  [[ $first -gt $_ddp_log_start ]] || first=$_ddp_log_start
  tail -c "+$first" "$_ddp_log" | grep -a '^srun: error: ' || true
}

# Whether srun has reported a lost node.
_ddp_srun_lost_a_node() {
  local reports='Node failure on|Cannot communicate with node|Timed out waiting for job step'
  grep -qE "$reports|failed on node .*: Communication" < <(_ddp_srun_errors)
}

# PID: srun can hang after it lost a node: while tasks on other nodes run, or when all of them have
# ended and it waits for those that are gone. After the first bad exit of a task it ends by itself
# within KillWait, 30 s where a site has not changed it.
_ddp_watch_srun() {
  trap 'kill $!; exit' TERM
  until _ddp_srun_lost_a_node || _ddp_srun_reported_a_task; do
    sleep 20 &
    wait $!
    kill -0 "$1" 2>/dev/null || exit 0 # its number may be another process's soon
  done
  sleep 90 &
  wait $!
  kill -KILL "$1"
}

_ddp_srun_reported_a_task() {
  grep -qE ': tasks? [0-9,-]+: ' < <(_ddp_srun_errors)
}
