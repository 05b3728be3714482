# shellcheck shell=sh
# All clocks follow the controller's: munge refuses credentials that are five minutes old or from the future.

wanted_clock() {
    if is_controller; then
        # Serves the nodes also without a connection to the outside: the same time on all nodes matters most.
        printf 'allow\nlocal stratum 10'
    else
        printf 'server %s iburst prefer' "$CONTROLLER_ADDRESS"
    fi
}

# Without the right to set the clock (bit 25, CAP_SYS_TIME; containers) chronyd needs the option not to.
may_set_clock() { [ "$((0x$(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status) >> 25 & 1))" = 1 ]; }

# systemd does not start chrony in a container, whose clock is the host's.
must_run() { may_set_clock || ! has_systemd; }

check() {
    missing=0
    if ! command -v chronyd >/dev/null; then
        say "chrony is not installed"
        missing=1
    elif [ "$(block_of /etc/chrony/chrony.conf)" != "$(wanted_clock)" ]; then
        say "chrony does not follow the controller"
        missing=1
    elif must_run && [ -z "$(daemon_pid chronyd)" ]; then
        say "chronyd is not running"
        missing=1
    fi
    return "$missing"
}

apply() {
    if ! command -v chronyd >/dev/null; then apt_install chrony; fi
    stop_daemon chrony chronyd
    write_block /etc/chrony/chrony.conf "$(wanted_clock)"
    if may_set_clock; then start_daemon chrony chronyd; else start_daemon chrony chronyd -x; fi
}

verify() {
    check && { ! must_run || chronyc -n tracking >&2; }
}
