# shellcheck shell=sh
# munge and slurm have the same ids on all nodes, set before the packages choose some. MUNGE_UID, SLURM_UID.

# A group of the same name, with any id: the packages of Debian and Ubuntu mostly choose another than the user's.
is_right() { # NAME ID
    [ "$(id -u "$1" 2>/dev/null)" = "$2" ] && [ "$(id -gn "$1" 2>/dev/null)" = "$1" ]
}

check() {
    missing=0
    for pair in "munge $MUNGE_UID" "slurm $SLURM_UID"; do
        if ! is_right "${pair% *}" "${pair#* }"; then
            name=${pair% *}
            has="id $(id -u "$name" 2>/dev/null || echo none) and group $(id -gn "$name" 2>/dev/null || echo none)"
            say "user $name has $has, not id ${pair#* } and group $name"
            missing=1
        fi
    done
    return "$missing"
}

one_user() { # NAME ID UNIT DAEMON: its files get the new id, too
    name=$1
    id=$2
    if is_right "$name" "$id"; then return; fi
    other=$(getent passwd "$id" | cut -d: -f1)
    if [ -n "$other" ] && [ "$other" != "$name" ]; then fail "id $id, wanted for $name, belongs to $other"; fi
    if [ -n "$(daemon_pid "$4")" ]; then stop_daemon "$3" "$4"; fi
    getent group "$name" >/dev/null || groupadd -r -g "$id" "$name" || groupadd -r "$name"
    if getent passwd "$name" >/dev/null; then
        usermod -u "$id" -g "$name" "$name"
    else
        useradd -r -u "$id" -g "$name" -d "/nonexistent" -M -s /usr/sbin/nologin "$name"
    fi
    for folder in "/etc/$name" "/var/lib/$name" "/var/log/$name" "/run/$name" /var/spool/slurm*; do
        if [ -e "$folder" ] && [ "$folder" != /etc/slurm ]; then chown -R "$name:$name" "$folder"; fi
    done
}

apply() {
    one_user munge "$MUNGE_UID" munge munged
    one_user slurm "$SLURM_UID" slurmctld slurmctld
}

verify() { check; }
