# shellcheck shell=sh
# slurmd, with the configuration that it fetches from the controller: no node keeps a copy that could get old.
# SLURM_CONF, GRES_CONF, CGROUP_CONF and GPU_CHECK are the files' texts.

server="$CONTROLLER_ADDRESS:6817"
case $CONTROLLER_ADDRESS in *:*) server="[$CONTROLLER_ADDRESS]:6817" ;; esac

options_text() {
    printf '# Written by: ddp-slurm cluster install\nSLURMD_OPTIONS="--conf-server %s"\n' "$server"
}

# Debian's unit does not start without /etc/slurm/slurm.conf, which only the controller has.
# The driver has to be loaded first: gres.conf lists its device files.
unit_text() {
    printf '[Unit]\nConditionPathExists=\nAfter=nvidia-persistenced.service munge.service\n'
}

# Where slurmd keeps what it fetched.
fetched() {
    for folder in /run/slurm/conf /var/lib/slurm/slurmd/conf-cache; do
        if [ -e "$folder/$1" ]; then cat "$folder/$1" && return; fi
    done
}

check() {
    missing=0
    if ! options_text | cmp -s - /etc/default/slurmd; then
        say "slurmd is not set to fetch its configuration from the controller"
        missing=1
    fi
    if has_systemd && ! unit_text | cmp -s - /etc/systemd/system/slurmd.service.d/ddp-slurm.conf; then
        say "slurmd's unit requires a file that only the controller has"
        missing=1
    fi
    if ! printf '%s' "$GPU_CHECK" | cmp -s - /usr/local/sbin/gpu_check.sh || [ ! -x /usr/local/sbin/gpu_check.sh ]; then
        say "/usr/local/sbin/gpu_check.sh, the health check, does not exist or is old"
        missing=1
    fi
    if ! is_controller && [ -e /etc/slurm/slurm.conf ]; then
        say "/etc/slurm/slurm.conf is a separate copy"
        missing=1
    fi
    if [ -z "$(daemon_pid slurmd)" ]; then
        say "slurmd is not running"
        missing=1
    elif [ "$(fetched slurm.conf)" != "$SLURM_CONF_TEXT" ] || [ "$(fetched gres.conf)" != "$GRES_CONF_TEXT" ] ||
        [ "$(fetched cgroup.conf)" != "$CGROUP_CONF_TEXT" ]; then
        say "slurmd runs with another configuration"
        missing=1
    fi
    return "$missing"
}

# Without trailing newlines: command substitution removes them from the fetched ones.
SLURM_CONF_TEXT=$(printf '%s' "$SLURM_CONF")
GRES_CONF_TEXT=$(printf '%s' "$GRES_CONF")
CGROUP_CONF_TEXT=$(printf '%s' "$CGROUP_CONF")
GPU_CHECK_TEXT=$(printf '%s' "$GPU_CHECK")

apply() {
    stop_daemon slurmd slurmd
    install -d -o slurm -g slurm -m 0755 /var/lib/slurm /var/log/slurm
    install -d -m 0755 /var/lib/slurm/slurmd
    # The doctor asks without root's rights, as one of the system's admins.
    touch /var/log/slurm/slurmd.log
    chgrp adm /var/log/slurm/slurmd.log
    chmod 0640 /var/log/slurm/slurmd.log
    if ! is_controller && [ -e /etc/slurm/slurm.conf ]; then
        mv --backup=numbered /etc/slurm/slurm.conf /etc/slurm/slurm.conf.old
    fi
    write_file /usr/local/sbin/gpu_check.sh 0755 root:root "$GPU_CHECK_TEXT
"
    write_file /etc/default/slurmd 0644 root:root "$(options_text)
"
    if has_systemd; then
        install -d -m 0755 /etc/systemd/system/slurmd.service.d
        write_file /etc/systemd/system/slurmd.service.d/ddp-slurm.conf 0644 root:root "$(unit_text)
"
        systemctl daemon-reload
    fi
    start_daemon slurmd slurmd --conf-server "$server" || say "$(last_errors_of slurmd)"
}

# Before it listens, slurmd may wait for a device file for 20 s, and end.
is_up() { check && scontrol show slurmd >&2; }

verify() {
    wait_for 60 is_up || say "$(last_errors_of slurmd)"
    is_up
}
