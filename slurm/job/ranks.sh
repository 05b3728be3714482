
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
