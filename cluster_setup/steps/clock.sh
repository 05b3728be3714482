# shellcheck shell=sh
# All clocks follow the controller's: munge refuses what is five minutes old or from the future.

wanted_clock() {
    if is_controller; then
        # Goes on serving the nodes when the outside cannot be reached: agreeing matters more than being right.
        printf 'allow\nlocal stratum 10'
    else
        printf 'server %s iburst prefer' "$CONTROLLER_ADDRESS"
    fi
}

# Without the right to set the clock (bit 25, CAP_SYS_TIME; containers) chronyd has to be told to leave it alone.
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
        say "chronyd does not run"
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
