# shellcheck shell=sh
# Slurm and munge from the distribution, unless they are already installed from elsewhere.

wanted_packages() {
    command -v munged >/dev/null || echo munge
    command -v slurmd >/dev/null || echo slurmd
    command -v scontrol >/dev/null || echo slurm-client
    if is_controller && ! command -v slurmctld >/dev/null; then echo slurmctld; fi
}

check() {
    missing=$(wanted_packages | tr '\n' ' ')
    if [ -n "$missing" ]; then
        say "not installed: ${missing% }"
        return 1
    fi
}

apply() {
    # shellcheck disable=SC2046 # one word a package
    apt_install $(wanted_packages)
}

verify() {
    check && slurmd -V >&2
}
