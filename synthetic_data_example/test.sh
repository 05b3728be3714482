#!/bin/bash
# 7 ranks on 3 nodes of cluster lab. Made by ddp-slurm submit; to change it, edit cluster.yaml and submit again.
# shellcheck disable=SC2016,SC2034,SC2317 # a $ in a value stands for itself; functions of traps
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

# The script's own names begin with _ddp_: --setup may use any other. Its last part, after
# the functions, starts the ranks.
_ddp_component_count=3
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
_ddp_open_run_folder
trap _ddp_on_exit EXIT
trap _ddp_on_term TERM
# Slurm before 20.02 and a plain 'bash' inside a job do not have components.
if [[ ${SLURM_HET_SIZE:-0} -ne 3 ]]; then
  _ddp_say "expected 3 components, got ${SLURM_HET_SIZE:-none}; was the script changed?"
  exit 2
fi

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
export DDP_SLURM_GLOBAL_BATCH_SIZE=256
export DDP_SLURM_SHARES='37(x4),36(x3)'
export DDP_SLURM_BALANCE=equal

_ddp_command=(python train.py 5 1)
_ddp_first_ranks=(0 1 3) # of each component
# For scripts that read SLURM_* themselves. This script runs on the host of rank 0. torch's own
# env:// cannot go to another port when it finds this one taken.
export MASTER_ADDR="${MASTER_ADDR:-${SLURMD_NODENAME:-$(hostname)}}"
export MASTER_PORT="${MASTER_PORT:-$(_ddp_free_port 0)}"

_ddp_start_ranks() {
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
