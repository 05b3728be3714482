#!/bin/bash
# 7 ranks on 3 nodes of cluster lab. Made by ddp-slurm submit; to change it, edit cluster.yaml and submit again.
# shellcheck disable=SC2016,SC2034,SC2317 # a $ in a value stands for itself; functions of traps
#SBATCH --job-name=cifar10
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --nodelist=gamma
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:titan:1
#SBATCH --mem=30G
#SBATCH --time=1:00:00
#SBATCH --signal=USR2@120
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --nodelist=beta
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:v100:2
#SBATCH --mem=60G
#SBATCH --time=1:00:00
#SBATCH --signal=USR2@120
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --nodelist=alpha
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=240G
#SBATCH --time=1:00:00
#SBATCH --signal=USR2@120

set -euo pipefail

# The script's own names begin with _ddp_: --setup may use any other. Its last part, after
# the functions, starts the ranks.
_ddp_component_count=3
_ddp_max_restarts=3
_ddp_sends_signal=yes # the ranks save and stop on SIGUSR2
_ddp_started=$(date +%Y-%m-%dT%H:%M:%S)
_ddp_runs_folder=
_ddp_marker= # path of the file that rank 0 creates after it stopped early and well
_ddp_restarts=${SLURM_RESTART_COUNT:-0}

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

# --- The port --------------------------------------------------------------------------------

# The first port from this job's own on at which nothing listens on this host, that of rank 0.
# NUMBER: of the start within the job.
_ddp_free_port() {
  local offset=$(((SLURM_JOB_ID + $1) % 19000)) port
  while :; do
    port=$((10000 + offset))
    # in hexadecimal, in state 0A: it listens
    grep -qsE ":$(printf %04X "$port") [0-9A-F]+:0000 0A " /proc/net/tcp /proc/net/tcp6 || break
    offset=$(((offset + 1) % 19000))
  done
  echo "$port"
}

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

# --- The step that runs the ranks ------------------------------------------------------------

_ddp_status=0              # of srun
_ddp_log=/proc/$$/fd/2     # the job's log, unless standard error is no file
_ddp_log_start=1           # where the output of this step begins

# PID: waits for srun in a way that lets bash react to SIGTERM at once. Sets _ddp_status.
_ddp_wait_for_step() {
  local watcher=
  _ddp_step=$1
  # SIGTERM came after the step had begun, and before its process id was known
  [[ $_ddp_soon == no || $_ddp_sends_signal == no ]] || kill -USR2 "$1" 2>/dev/null || true
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

# --- srun's task numbers as ranks ------------------------------------------------------------

# srun counts tasks within a component: prints the ranks of its messages such as
# "srun: error: NODE: tasks 0-1: Killed".
_ddp_name_ranks() {
  local line pattern='^srun: error: ([^ ]+): tasks? ([0-9,-]+): (.*)$'
  while IFS= read -r line; do
    [[ $line =~ $pattern ]] || continue
    _ddp_name_ranks_of "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "${BASH_REMATCH[3]}"
  done < <(_ddp_srun_errors | head -n 100)
}

# NODES TASKS MESSAGE
_ddp_name_ranks_of() {
  local group nodes node ranks
  node=$(scontrol show hostnames "$1" | head -n 1)
  for ((group = 0; group < _ddp_component_count; group++)); do
    nodes=SLURM_JOB_NODELIST_HET_GROUP_$group
    [[ $_ddp_component_count -gt 1 ]] || nodes=SLURM_JOB_NODELIST
    if grep -qxF -- "$node" < <(scontrol show hostnames "${!nodes}"); then
      ranks=$(_ddp_add_to_numbers "${_ddp_first_ranks[group]}" "$2")
      [[ $ranks == *[-,]* ]] && ranks="ranks $ranks" || ranks="rank $ranks"
      _ddp_say "$ranks on $1: $3"
      return 0
    fi
  done
}

# 3 0-1,4: prints 3-4,7
_ddp_add_to_numbers() {
  local rest=$2 sum=
  while [[ $rest =~ ^([^0-9]*)([0-9]+)(.*)$ ]]; do
    sum+=${BASH_REMATCH[1]}$((BASH_REMATCH[2] + $1))
    rest=${BASH_REMATCH[3]}
  done
  echo "$sum"
}

# --- The job ---------------------------------------------------------------------------------

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "$0: this is a job script; start it with: sbatch $0" >&2
  exit 2
fi
_ddp_end_where_all_is_done
_ddp_open_run_folder
trap _ddp_on_exit EXIT
trap _ddp_on_term TERM
# Slurm before 20.02 and a plain 'bash' inside a job do not have components.
if [[ ${SLURM_HET_SIZE:-0} -ne 3 ]]; then
  _ddp_say "expected 3 components, got ${SLURM_HET_SIZE:-none}; was the script changed?"
  exit 2
fi
if [[ $_ddp_restarts -gt 3 ]]; then
  _ddp_say "restarted $_ddp_restarts times, 3 are allowed; giving up"
  exit 75
fi
_ddp_wait_for_components
# Its messages, such as of its end together with the script, are not about the ranks.
_ddp_watch_first_component srun </dev/null >/dev/null 2>&1 &
_ddp_watch=$!
disown "$_ddp_watch" # bash would report that it is killed at the end

# By this the ranks recognise each other when they meet. Made here, since Slurm keeps this file, and
# before anything can switch on tracing.
DDP_SLURM_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export DDP_SLURM_TOKEN

export PYTHONUNBUFFERED=1
# As torchrun does: with a thread for every core of the node in each rank, the ranks wait for each
# other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export DDP_SLURM_WORLD_SIZE=7
export DDP_SLURM_TASKS_PER_NODE=1,2,4
export DDP_SLURM_GLOBAL_BATCH_SIZE=512
export DDP_SLURM_SHARES='74,73(x6)'
export DDP_SLURM_BALANCE=equal
# Rank 0 runs on this host; it creates the file after it stopped early and well.
_ddp_marker=$(mktemp -d)/requeue
export DDP_SLURM_REQUEUE_MARKER=$_ddp_marker

_ddp_command=(python train.py 10 1 --data cifar10.npz)
_ddp_first_ranks=(0 1 3) # of each component
# For scripts that read SLURM_* themselves. This script runs on the host of rank 0. torch's own
# env:// cannot go to another port when it finds this one taken.
export MASTER_ADDR="${MASTER_ADDR:-${SLURMD_NODENAME:-$(hostname)}}"
export MASTER_PORT="${MASTER_PORT:-$(_ddp_free_port 0)}"

_ddp_start_ranks() {
  # SIGTERM came during --setup: the ranks would only be asked to stop
  [[ $_ddp_soon == no || $_ddp_sends_signal == no ]] || exit 143
  # srun takes the batch shell's own sizes, those of component 0, as the default of every segment:
  # Slurm 24.11 and 26.05 then refuse the step, 20.11 starts component 0 alone. Without them and
  # with each segment's own sizes the step is one world on all releases from 20.11 on.
  unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE
  unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NNODES SLURM_NODELIST SLURM_JOB_NODELIST
  unset SLURM_JOB_NUM_NODES SLURM_JOB_CPUS_PER_NODE SLURM_MEM_PER_NODE
  # --kill-on-bad-exit: one dead rank ends the others, which would hold their GPUs until a time-out.
  # --wait=0: a site's WaitTime would kill those that end later than the first, as rank 0 may, which
  # saves.
  exec srun --label --kill-on-bad-exit=1 --wait=0 \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8 \
    "${_ddp_command[@]}" : \
    --nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=8 \
    "${_ddp_command[@]}" : \
    --nodes=1 --ntasks=4 --ntasks-per-node=4 --cpus-per-task=8 \
    "${_ddp_command[@]}"
}
_ddp_note_log_size
_ddp_start_ranks &
_ddp_step=$!
_ddp_wait_for_step "$_ddp_step"
[[ $_ddp_status -eq 0 ]] || _ddp_name_ranks
_ddp_end
