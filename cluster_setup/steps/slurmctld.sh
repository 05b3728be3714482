# shellcheck shell=sh
# On the controller: the one copy of the configuration, and slurmctld, which hands it to the nodes.
# SLURM_CONF, GRES_CONF and CGROUP_CONF are the files' texts.

config_text() {
    case $1 in
    slurm.conf) printf '%s' "$SLURM_CONF" ;;
    gres.conf) printf '%s' "$GRES_CONF" ;;
    cgroup.conf) printf '%s' "$CGROUP_CONF" ;;
    esac
}

check() {
    missing=0
    for file in slurm.conf gres.conf cgroup.conf; do
        if ! config_text "$file" | cmp -s - "/etc/slurm/$file"; then
            say "/etc/slurm/$file does not match cluster.yaml"
            missing=1
        fi
    done
    if [ -z "$(daemon_pid slurmctld)" ]; then
        say "slurmctld is not running"
        missing=1
    fi
    return "$missing"
}

apply() {
    # Stopped first: after an interruption it cannot run with the old configuration. Jobs continue meanwhile.
    stop_daemon slurmctld slurmctld
    install -d -m 0755 /etc/slurm
    install -d -o slurm -g slurm -m 0755 /var/lib/slurm /var/lib/slurm/slurmctld /var/log/slurm
    for file in slurm.conf gres.conf cgroup.conf; do
        if [ -e "/etc/slurm/$file" ] && ! config_text "$file" | cmp -s - "/etc/slurm/$file"; then
            cp -p --backup=numbered "/etc/slurm/$file" "/etc/slurm/$file.old" # may have been edited by hand
            say "the previous one is kept: /etc/slurm/$file.old"
        fi
        write_file "/etc/slurm/$file" 0644 root:root "$(config_text "$file")
"
    done
    start_daemon slurmctld slurmctld || say "$(last_errors_of slurmctld)"
}

verify() {
    wait_for 60 scontrol ping || say "slurmctld does not respond: $(last_errors_of slurmctld)"
    check
}
