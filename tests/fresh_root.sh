#!/usr/bin/env bash
# make demo and make test on a machine that has nothing but what the README asks for: a new Debian root.
#
#     sudo tests/fresh_root.sh [TARGET ...]        make's targets [default: demo test]
#
# The last commit is cloned into the root and used there. Everything runs in a mount and a PID namespace
# of its own: its mounts and processes end with it, also when it fails or is interrupted. The network
# is this machine's: no lab may run outside at the same time.
#
#   FRESH_SUITE    release of Debian [default: bookworm]
#   FRESH_MIRROR   where debootstrap gets it [default: debootstrap's own choice]
#   FRESH_FOLDER   where the root is made, about 8 GB [default: a folder in /var/tmp, removed at the end]
#   FRESH_BIND     this machine's files that pip or apt need to reach an index, separated by blanks;
#                  they appear in the root under the same paths, read-only. PIP_* and *_proxy are passed on.
set -euo pipefail

main() {
    [[ $EUID == 0 ]] || { echo "fresh_root.sh: needs root (debootstrap, chroot)" >&2; exit 2; }
    command -v debootstrap >/dev/null || { echo "fresh_root.sh: debootstrap is not installed" >&2; exit 2; }
    local folder
    folder=$(mktemp -d "${FRESH_FOLDER:-/var/tmp}/fresh_root.XXXXXX")
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf --one-file-system '$folder'" EXIT
    git clone --quiet --no-hardlinks "$(git -C "$(dirname "$0")" rev-parse --show-toplevel)" "$folder/clone"
    [[ $# -gt 0 ]] || set -- demo test
    unshare --mount --pid --fork --kill-child "$BASH" "$0" --inside "$folder" "$@"
}

# In the namespaces: make the root, mount what a machine has, run make.
inside() {
    local folder=$1 root=$1/root path
    shift
    debootstrap --variant=minbase --include=git,make,python3,ca-certificates \
        "${FRESH_SUITE:-bookworm}" "$root" ${FRESH_MIRROR:+"$FRESH_MIRROR"} >"$folder/debootstrap.log" 2>&1 ||
        { tail -n 20 "$folder/debootstrap.log" >&2; exit 1; }
    mv "$folder/clone" "$root/root/ddp_slurm"
    cp --dereference /etc/resolv.conf /etc/hosts "$root/etc/"
    mount --rbind "$root" "$root" # so that / is a mount point there, as ip netns wants it
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys" # with the control groups
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    for path in ${FRESH_BIND:-}; do
        if [[ -d $path ]]; then mkdir -p "$root$path"; else install -D /dev/null "$root$path"; fi
        mount --bind -o ro "$path" "$root$path"
    done
    local name environ=(HOME=/root LANG=C.UTF-8)
    environ+=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
    for name in $(compgen -e | grep -E '^PIP_|_(proxy|PROXY)$' || true); do
        environ+=("$name=${!name}")
    done
    # Not chroot: a process that enters this mount namespace has to find the new root there, too.
    mkdir "$root/old"
    cd "$root"
    pivot_root . old
    cd /
    umount --lazy /old
    local target
    for target; do
        echo "fresh_root.sh: make $target"
        env -i "${environ[@]}" make -C /root/ddp_slurm "$target"
    done
    echo "fresh_root.sh: all of it succeeded: make $*"
}

if [[ ${1:-} == --inside ]]; then
    inside "${@:2}"
else
    main "$@"
fi
