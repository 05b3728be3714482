# shellcheck shell=sh
# Every node has every node's address, and its host name is its name in slurm.conf.

wanted_hosts() { printf '%s\n' "$NODES" | while read -r name address; do printf '%s %s\n' "$address" "$name"; done; }

full_name() { uname -n; }

# slurmd looks in slurm.conf for the name before the first dot, then for all of it.
is_named() { [ "$(full_name)" = "$NODE" ] || [ "$(full_name | cut -d. -f1)" = "$NODE" ]; }

# Ubuntu gives a machine's own name to 127.0.1.1, where no other rank can reach it.
own_loopback() { grep -Eq "^127\.[0-9.]+[[:space:]]+(.*[[:space:]])?$NODE([[:space:]].*)?$" /etc/hosts 2>/dev/null; }

# Other lines stay: they may be for a second network. But they come first, and an old address would win.
say_other_addresses() {
    sed "/^$MARK_BEGIN/,/^$MARK_END/d" /etc/hosts | while read -r address names; do
        case $address in '#'* | 127.*) continue ;; esac
        for name in ${names%%#*}; do
            wanted=$(printf '%s\n' "$NODES" | sed -n "s/^$name //p")
            if [ -n "$wanted" ] && [ "$wanted" != "$address" ]; then
                say "/etc/hosts also has another line that gives $name the address $address, not $wanted"
            fi
        done
    done
}

check() {
    missing=0
    say_other_addresses
    if ! is_named; then
        say "the host name is $(full_name), not $NODE"
        missing=1
    fi
    if [ "$(block_of /etc/hosts)" != "$(wanted_hosts)" ]; then
        say "/etc/hosts does not have the nodes' addresses"
        missing=1
    fi
    if own_loopback; then
        say "/etc/hosts gives $NODE a loopback address"
        missing=1
    fi
    return "$missing"
}

apply() {
    if ! is_named; then
        if has_systemd; then
            hostnamectl set-hostname "$NODE"
        else
            write_file /etc/hostname 0644 root:root "$NODE
"
            hostname "$NODE"
        fi
    fi
    if own_loopback; then
        text=$(sed -E "/^127\.[0-9.]+[[:space:]]/s/[[:space:]]$NODE([[:space:]]|\$)/\1/" /etc/hosts |
            sed -E 's/^127\.[0-9.]+[[:space:]]*$//')
        write_file /etc/hosts 0644 root:root "$text
"
    fi
    write_block /etc/hosts "$(wanted_hosts)"
}

verify() {
    check && getent hosts "$NODE" >&2
}
