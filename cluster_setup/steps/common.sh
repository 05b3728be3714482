# shellcheck shell=sh
# The common part, before each step. A step defines three functions:
#   check   reports what is missing (say) and returns non-zero; changes nothing
#   apply   makes the changes; may run again after an interruption at any point
#   verify  checks the result of apply
# What a step prints goes to standard error; fd 3 has the lines that the installer reads: `say TEXT`, `result WORD`.
# Variables set before it: NODE, NODES (NAME ADDRESS lines), CONTROLLER, CONTROLLER_ADDRESS, DRY_RUN=yes|no.

set -eu
LC_ALL=C
DEBIAN_FRONTEND=noninteractive
NEEDRESTART_MODE=a
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export LC_ALL DEBIAN_FRONTEND NEEDRESTART_MODE PATH
umask 022
exec 3>&1 1>&2

MARK_BEGIN='# begin of ddp-slurm'
MARK_END='# end of ddp-slurm'

say() { printf 'say %s\n' "$*" >&3; }

fail() {
    say "$*"
    exit 1
}

is_controller() { [ "$NODE" = "$CONTROLLER" ]; }

has_systemd() { [ -d /run/systemd/system ]; }

# The marked block of a file, without its marks.
block_of() { sed -n "/^$MARK_BEGIN/,/^$MARK_END/p" "$1" 2>/dev/null | sed "/^$MARK_BEGIN/d;/^$MARK_END/d"; }

write_file() { # PATH MODE OWNER TEXT: whole or not at all
    draft=$(mktemp "$1.XXXXXX")
    printf '%s' "$4" >"$draft"
    chmod "$2" "$draft"
    chown "$3" "$draft"
    mv -f "$draft" "$1"
}

write_block() { # PATH TEXT: the marked block replaced, the rest left as it is
    if grep -qs "^$MARK_BEGIN" "$1" && ! grep -q "^$MARK_END" "$1"; then
        fail "$1 has the line '$MARK_BEGIN', but not '$MARK_END': add it where the block ends"
    fi
    rest=$(sed "/^$MARK_BEGIN/,/^$MARK_END/d" "$1" 2>/dev/null || true)
    write_file "$1" 0644 root:root "$rest
$MARK_BEGIN
$2
$MARK_END
"
}

apt_install() {
    apt-get -q update 3>&- || say "the package lists could not be updated; the existing ones are used"
    # An automatic upgrade may hold the lock for minutes after a machine has started.
    apt-get -q -y --no-install-recommends -o DPkg::Lock::Timeout=600 -o Dpkg::Options::=--force-confold install "$@" 3>&-
}

# A daemon that inherits fd 3 would keep the installer's connection open for as long as it runs.
start_daemon() { # UNIT COMMAND...: with systemd, or by the command where there is no systemd
    unit=$1
    shift
    started=$(date +%s)
    old_log_bytes=$(stat -c %s "$(log_of "$unit")" 2>/dev/null || echo 0)
    if has_systemd; then systemctl enable --now "$unit"; else "$@" </dev/null 3>&-; fi
}

daemon_pid() { # NAME: of the running one, if any
    pidof -s "$1" || true
}

stop_daemon() { # UNIT NAME
    if has_systemd; then
        systemctl stop "$1"
        return
    fi
    pid=$(daemon_pid "$2")
    if [ -n "$pid" ]; then
        kill "$pid"
        tries=0
        while kill -0 "$pid" 2>/dev/null; do
            tries=$((tries + 1))
            if [ "$tries" -gt 300 ]; then fail "$2 (process $pid) does not stop"; fi
            sleep 0.1
        done
    fi
}

wait_for() { # SECONDS COMMAND...: without its output
    tries=$(($1 * 5))
    shift
    until "$@" 3>/dev/null >/dev/null; do
        tries=$((tries - 1))
        if [ "$tries" -le 0 ]; then return 1; fi
        sleep 0.2
    done
}

log_of() { # UNIT
    case $1 in
    munge) echo /var/log/munge/munged.log ;;
    *) echo "/var/log/slurm/$1.log" ;;
    esac
}

errors_in() { grep -iE 'error|fatal|fail|skipped because' | grep -v '\.service: ' | tail -n 3 | sed 's/^\[[^]]*\] //' | tr '\n' ' '; }

# Of this start, not of earlier ones: from its log, or from the journal, where it is without its configuration.
last_errors_of() { # UNIT
    errors=$(tail -c "+$((old_log_bytes + 1))" "$(log_of "$1")" 2>/dev/null | errors_in)
    if [ -z "$errors" ] && has_systemd; then
        errors=$(journalctl --unit "$1" --since "@$started" --output cat --no-pager 2>/dev/null | errors_in)
    fi
    echo "$errors"
}

run_step() {
    if check; then
        echo 'result ok' >&3
    elif [ "$DRY_RUN" = yes ]; then
        echo 'result would-change' >&3
    else
        apply
        if ! verify; then exit 1; fi
        echo 'result changed' >&3
    fi
}
