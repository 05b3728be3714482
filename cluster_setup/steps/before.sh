# shellcheck shell=sh
# Reports what the installer needs to know of a node before the steps. ASK_KEY=yes on the controller: also its munge
# key, if it has one.

fact() { printf 'fact %s %s\n' "$1" "$2" >&3; }

candidate() { apt-cache policy slurmd 2>/dev/null | sed -n 's/^ *Candidate: *//p' | grep -v '(none)' || true; }

fact munge_uid "$(id -u munge 2>/dev/null || true)"
fact cgroup "$(stat -fc %T /sys/fs/cgroup 2>/dev/null || true)"
fact slurm_uid "$(id -u slurm 2>/dev/null || true)"
if command -v slurmd >/dev/null; then
    fact slurm_version "$(slurmd -V | sed 's/.* //')"
else
    if [ -z "$(candidate)" ] && [ "$DRY_RUN" = no ]; then apt-get -q update || true; fi
    fact slurm_version "$(candidate | sed 's/^[0-9]*://;s/[-+~].*//')"
fi
# munged accepts no key below 32 bytes; those of Debian's package have 128.
if [ "${ASK_KEY:-}" = yes ] && [ "$(stat -c %s /etc/munge/munge.key 2>/dev/null || echo 0)" -ge 32 ]; then
    fact munge_key "$(base64 -w0 /etc/munge/munge.key)"
fi
