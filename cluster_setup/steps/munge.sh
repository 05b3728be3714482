# shellcheck shell=sh
# One key on all nodes, readable by munge alone. MUNGE_KEY is its base64 text, which came over ssh's standard input.

key=/etc/munge/munge.key

has_key() { [ "$(base64 -w0 <"$key" 2>/dev/null)" = "$MUNGE_KEY" ]; }

check() {
    missing=0
    if ! has_key; then
        say "$key is not the key of the cluster"
        missing=1
    elif [ "$(stat -c '%a %U:%G' "$key")" != '400 munge:munge' ]; then
        say "$key is $(stat -c '%a %U:%G' "$key"), not 400 munge:munge"
        missing=1
    fi
    if ! munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then
        say "munged does not respond"
        missing=1
    fi
    return "$missing"
}

apply() {
    # munged reads its key at start only. Stopped first: after an interruption it cannot run with the old key.
    stop_daemon munge munged
    install -d -o munge -g munge -m 0700 /etc/munge /var/lib/munge /var/log/munge
    install -d -o munge -g munge -m 0755 /run/munge
    draft=$(umask 077 && mktemp "$key.XXXXXX")
    printf '%s' "$MUNGE_KEY" | base64 -d >"$draft"
    chown munge:munge "$draft"
    chmod 0400 "$draft"
    mv -f "$draft" "$key"
    start_daemon munge runuser -u munge -- munged || say "$(last_errors_of munge)"
}

verify() { check; }
