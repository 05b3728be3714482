# shellcheck shell=sh
# Runs one node's ranks, and stops them when the submitting machine is gone.
# Arguments: SILENCE and GRACE, in seconds.
#
# Standard input is the lifeline. It brings this program, the command as one line, a line that cleans
# up, and then a dot every few seconds. The command is not an argument, since all users of the node
# can read arguments. When no dot arrives for SILENCE seconds, or the input ends, the command's
# process group gets SIGTERM, and GRACE seconds later SIGKILL. The exit status is the command's.

exec 3<&0
IFS= read -r line <&3 && IFS= read -r clean_up <&3 || exit 125

# A session of its own is a process group of its own; the command does not inherit its own text.
export line
# shellcheck disable=SC2016 # for the inner shell
setsid bash -c 'command=$line; unset line; eval "$command"' </dev/null 3<&- &
child=$!
unset line

watch_lifeline() {
  while [ "$(timeout "$1" head -c 1 <&3)" = . ]; do
    :
  done
  kill -s TERM -- "-$child"
  sleep "$2"
  kill -s KILL -- "-$child"
  eval "$clean_up"
}
watch_lifeline "$1" "$2" >/dev/null 2>&1 &
watcher=$!
exec 3<&-

wait "$child"
status=$?
# SIGTERM ends the inner shell at once. torchrun needs a moment more: its ranks have sessions of their
# own, and only torchrun ends them.
moments=$(($2 * 10))
while [ "$status" = 143 ] && [ "$moments" -gt 0 ] && kill -s 0 -- "-$child" 2>/dev/null; do
  sleep 0.1
  moments=$((moments - 1))
done
kill "$watcher"
kill -s KILL -- "-$child" 2>/dev/null
eval "$clean_up" >/dev/null 2>&1
exit "$status"
