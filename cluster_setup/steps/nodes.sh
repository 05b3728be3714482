# shellcheck shell=sh
# On the controller: every node has registered and accepts jobs. A node drained by an administrator stays drained.

# NODE|STATE|USER|REASON, one line a node
node_states() { sinfo -h -N -o '%N|%T|%u|%E' | sort -u; }

# Those that Slurm itself took out: by slurmctld, whose user is slurm.
unready() {
    node_states | while IFS='|' read -r name state user reason; do
        case $state in
        *power*) ;; # power saving: Slurm switches the node on for a job
        *drain* | *down* | *fail* | *unk* | *'*' | *'#')
            case $user in
            slurm* | Unknown* | '') printf '%s|%s|%s\n' "$name" "$state" "$reason" ;;
            esac
            ;;
        esac
    done
}

check() {
    if ! scontrol ping >/dev/null 2>&1; then
        say "slurmctld does not respond"
        return 1
    fi
    node_states | while IFS='|' read -r name state user reason; do
        case $state:$user in *drain*:slurm* | *drain*:Unknown*) ;; *drain*) say "$name stays drained, by $user: $reason" ;; esac
    done
    list=$(unready)
    if [ -n "$list" ]; then
        printf '%s\n' "$list" | while IFS='|' read -r name state reason; do say "$name is $state: $reason"; done
        return 1
    fi
}

resume_and_check() {
    unready | while IFS='|' read -r name state _; do
        case $state in
        *drain* | *down*) scontrol update "nodename=$name" state=resume || true ;;
        esac
    done
    check
}

apply() { wait_for 60 resume_and_check || true; }

verify() { check; }
