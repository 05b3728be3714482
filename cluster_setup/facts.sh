#!/bin/sh
# Prints what this machine is and what it runs. `ddp-slurm cluster probe` and `ddp-slurm doctor` send it over ssh. It
# reads only, needs nothing but a POSIX shell, and leaves out the facts of tools that do not exist.
#
# Lines: `fact KEY VALUE`, or `block NAME STATUS` followed by a command's output, each of its lines behind a `|`.
#
# Set before it, all optional:
#   DEPTH=doctor       also the state of Slurm, munge, users, files, names and ports
#   DEPTH=credential   only a new munge credential
#   PEERS              the other nodes, as NAME=ADDRESS words
#   PORTS              TCP ports to try on each of them
#   CREDENTIAL         a munge credential to decode
#   PYTHON             the interpreter that trains
#   PATIENCE           seconds for each tool

LC_ALL=C
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/opt/rocm/bin
export LC_ALL PATH

fact() { printf 'fact %s %s\n' "$1" "$2"; }

have() { command -v "$1" >/dev/null 2>&1; }

block() { # NAME COMMAND...: nothing where the command does not exist
    block_name=$1
    shift
    have "$1" || return 0
    if have timeout; then set -- timeout -k 2 "${PATIENCE:-20}" "$@"; fi
    block_text=$("$@" 2>&1)
    printf 'block %s %s\n' "$block_name" "$?"
    printf '%s\n' "$block_text" | sed 's/^/|/'
}

file_block() { # NAME FILE
    if [ -r "$2" ]; then block "$1" cat "$2"; fi
}

machine() {
    fact hostname "$(uname -n)"
    fact kernel "$(uname -r)"
    fact arch "$(uname -m)"
    fact now "$(date +%s.%N)"
    # shellcheck source=/dev/null # the distribution's own file
    if [ -r /etc/os-release ]; then (. /etc/os-release && fact os "${ID:-linux}-${VERSION_ID:-unknown}"); fi
    if have getconf; then fact libc "$(getconf GNU_LIBC_VERSION 2>/dev/null)"; fi
    while read -r key value _; do
        if [ "$key" = MemTotal: ]; then fact memory_kib "$value"; fi
    done </proc/meminfo
    for cpu in /sys/devices/system/cpu/cpu[0-9]*; do
        if [ -r "$cpu/topology/core_id" ]; then
            fact cpu "$(cat "$cpu/topology/physical_package_id") $(cat "$cpu/topology/core_id")"
        fi
    done
    if have nproc; then fact cpus_usable "$(nproc)"; fi
}

network() {
    # The address that the prober reached; without ssh there is none.
    # shellcheck disable=SC2086 # four words
    set -- ${SSH_CONNECTION:-}
    if [ -n "${3:-}" ]; then fact reached_at "$3"; fi
    for path in /sys/class/net/*; do
        if [ -e "$path" ]; then
            fact mtu "${path##*/} $(cat "$path/mtu" 2>/dev/null || echo 0)"
            fact interface "${path##*/} $(cat "$path/operstate" 2>/dev/null || echo unknown) $(cat "$path/speed" 2>/dev/null || echo -1)"
        fi
    done
    block addresses ip -o addr show
    file_block routes /proc/net/route
}

gpus() {
    block nvidia-smi nvidia-smi --query-gpu=index,pci.bus_id,memory.total,driver_version,name --format=csv,noheader,nounits
    # Separate queries: drivers that do not know the field (before 510, 450) would print nothing else either.
    block nvidia-smi.capability nvidia-smi --query-gpu=index,compute_cap --format=csv,noheader
    block nvidia-smi.mig nvidia-smi --query-gpu=index,mig.mode.current --format=csv,noheader
    block nvidia-smi.list nvidia-smi --list-gpus
    for path in /proc/driver/nvidia/gpus/*/information; do
        if [ -r "$path" ]; then block nvidia.information cat "$path"; fi
    done
    file_block nvidia.module /proc/driver/nvidia/version
    block amd-smi amd-smi static --asic --bus --vram --driver --json
    block rocm-smi rocm-smi --showproductname --showmeminfo vram --showbus --showdriverversion --json
    for path in /sys/bus/pci/devices/*; do # display and 3D controllers, seen also without a driver
        case $(cat "$path/class" 2>/dev/null) in
        0x0300* | 0x0302*) fact pci_gpu "$(cat "$path/vendor")" ;;
        esac
    done
    for path in /dev/nvidia[0-9]* /dev/dri/renderD*; do
        if [ -c "$path" ]; then fact device "$path"; fi
    done
}

slurm() {
    block slurmd.version slurmd -V
    block slurmctld.version slurmctld -V
    if have slurmd && have pidof; then
        if pidof slurmd >/dev/null; then
            fact slurmd_runs yes
        else
            fact slurmd_runs no
            # Without the configuration of the controller it writes no log file.
            block slurmd.journal journalctl --unit slurmd --lines 20 --output cat --no-pager
            if [ -r /var/log/slurm/slurmd.log ]; then
                block slurmd.log tail -n 20 /var/log/slurm/slurmd.log
            elif [ -e /var/log/slurm/slurmd.log ]; then
                fact slurmd_log_hidden yes
            fi
        fi
        for pid in $(pidof slurmd); do file_block slurmd.limits "/proc/$pid/limits"; done
    fi
    block slurm.ping scontrol ping
    case ${block_text:-} in # every other request to a controller that is down waits for a minute
    *' UP'*)
        block slurm.config scontrol show config
        block slurm.nodes scontrol show node
        block slurm.partitions scontrol show partition
        slurmctld_answers=yes
        silent_nodes=$(sinfo -h -N -o '%N %T' 2>/dev/null | sed -n 's/ .*\*$//p')
        ;;
    esac
    for folder in ${SLURM_CONF:+"${SLURM_CONF%/*}"} /etc/slurm /etc/slurm-llnl /run/slurm/conf /usr/local/etc; do
        for path in "$folder"/slurm.conf "$folder"/gres.conf "$folder"/cgroup.conf; do
            if [ -r "$path" ]; then fact config_file "$path $(cksum <"$path")"; fi
        done
        file_block gres.conf "$folder/gres.conf"
    done
    fact cgroup "$(stat -fc %T /sys/fs/cgroup 2>/dev/null)"
    if [ -r /sys/fs/cgroup/cgroup.controllers ]; then
        fact cgroup_controllers "$(cat /sys/fs/cgroup/cgroup.controllers)"
    else
        fact cgroup_controllers "$(sed -n 's|^cgroup /sys/fs/cgroup/\([^ ]*\) cgroup .*|\1|p' /proc/mounts | tr ',\n' '  ')"
    fi
    for path in /usr/lib/*/slurm*/cgroup_v?.so /usr/lib/slurm*/cgroup_v?.so /usr/lib64/slurm/cgroup_v?.so \
        /usr/local/lib/slurm/cgroup_v?.so /opt/slurm/lib/slurm/cgroup_v?.so; do
        if [ -e "$path" ]; then fact cgroup_plugin "$path"; fi
    done
}

find_munge_socket() { # munge_socket: an option for a munged of Slurm's own
    munge_socket=$(scontrol show config 2>/dev/null | sed -n 's/^AuthInfo.*socket=\([^, ]*\).*/--socket=\1/p')
}

credential() {
    find_munge_socket
    # shellcheck disable=SC2086 # one option or none
    block credential munge -n $munge_socket
}

identity() {
    block users getent passwd
    getent passwd | while IFS=: read -r user _ id _ _ home _; do
        if [ "$id" -ge 1000 ] && [ "$id" -lt 60000 ] && [ ! -d "$home" ]; then fact no_home "$user $home"; fi
    done
    block disks df -Pk /tmp /dev/shm /var/lib /var/log /var/spool /var/lib/slurm /var/lib/slurm/slurmctld /var/lib/slurm/slurmd
    if grep -q ' /tmp [^ ]* [^ ]*noexec' /proc/mounts; then fact tmp_noexec yes; fi
    if have munged; then fact munged "$(command -v munged)"; fi
    if [ -e /etc/munge/munge.key ]; then
        fact munge_key "$(stat -c '%a %U %s' /etc/munge/munge.key)"
    elif [ -d /etc/munge ] && [ ! -x /etc/munge ]; then
        fact munge_key_hidden yes
    fi
    if [ -z "${CREDENTIAL:-}" ]; then # no node could make one: why not this one
        credential
    elif have unmunge; then
        find_munge_socket
        # shellcheck disable=SC2086 # one option or none
        block_text=$(printf '%s\n' "$CREDENTIAL" | unmunge $munge_socket 2>&1)
        printf 'block unmunge %s\n' "$?"
        printf '%s\n' "$block_text" | sed 's/^/|/'
    fi
}

try_port() { # NAME ADDRESS PORT
    answer=$(timeout 4 bash -c "exec 3<>/dev/tcp/$2/$3" 2>&1)
    case $?:$answer in
    0:*) fact port "$1 $3 open" ;;
    124:*) fact port "$1 $3 silent" ;;
    *refused*) fact port "$1 $3 refused" ;;
    *) fact port "$1 $3 unreachable" ;;
    esac
}

# A connection without a message is an error in the logs of Slurm's daemons, in the words of unequal munge keys. So
# where Slurm runs its ports are tried only if its own messages did not come through: 6817 if slurmctld does not
# respond, 6818 if it does and has not heard of the node.
is_worth_trying() { # NAME PORT
    case ${slurmctld_answers:-no}:$2 in
    yes:6817) return 1 ;;
    yes:6818) printf '%s\n' "$silent_nodes" | grep -qxF "$1" ;;
    no:6818) ! have scontrol ;;
    esac
}

peers() {
    own=$(uname -n)
    for peer in "${own%%.*}=" ${PEERS:-}; do
        fact resolves "${peer%%=*} $(getent ahosts "${peer%%=*}" | sed -n 's/^\([^ ]*\) *STREAM.*/\1/p' | tr '\n' ' ')"
    done
    for peer in "${own%%.*}=" ${PEERS:-}; do # the lines of a person's own, before the installer's block
        sed '/^# begin of ddp-slurm/,$d' /etc/hosts 2>/dev/null | grep -nE "^[^#]*[[:space:]]${peer%%=*}([[:space:]]|\$)" |
            while IFS=: read -r number line; do fact hosts_line "${peer%%=*} $number $line"; done
    done
    have bash && have timeout || return 0
    # A name that never exists: every DNS server of a machine answers this at once.
    timeout 5 getent ahosts ddp-slurm.invalid >/dev/null 2>&1
    if [ "$?" = 124 ]; then fact dns_silent "$(sed -n 's/^nameserver *//p' /etc/resolv.conf | tr '\n' ' ')"; fi
    for peer in ${PEERS:-}; do
        for port in ${PORTS:-}; do
            if is_worth_trying "${peer%%=*}" "$port"; then try_port "${peer%%=*}" "${peer#*=}" "$port" & fi
        done
    done
    wait
}

training() {
    PATIENCE=120 # the first import of torch from a slow disk
    # shellcheck disable=SC2016 # Python, not shell
    block training "${PYTHON:-python3}" -c '
import json, platform
found = {"python": platform.python_version()}
try:
    import torch
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda or torch.version.hip or "none"
    found["cudnn"] = str(torch.backends.cudnn.version() or "none")
    if torch.version.cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["architectures"] = torch._C._cuda_getArchFlags() or ""
    if torch.version.cuda or torch.version.hip:
        found["cards"], failures = 0, []
        try:
            torch.cuda.init()
        except Exception as error:
            failures.append(str(error).splitlines()[0])
        for card in range(0 if failures else torch.cuda.device_count()):
            try:
                ones = torch.ones(64, 64, device=card)
                assert float((ones @ ones).sum()) == 64**3, "wrong result"
                found["cards"] += 1
            except Exception as error:
                failures.append(f"cuda:{card}: " + str(error).splitlines()[0])
        found["card_errors"] = "; ".join(failures)
except Exception as error:
    found["torch_error"] = f"{type(error).__name__}: {error}"
try:
    import ddp_slurm
    found["ddp_slurm"] = ddp_slurm.__version__
except Exception:
    found["ddp_slurm"] = "none"
print("facts " + json.dumps(found))
'
}

# On a new line: what the login shell printed before may not end with a newline.
printf '\nfacts begin\n'
if [ "${DEPTH:-}" = credential ]; then
    credential
else
    machine
    network
    gpus
fi
if [ "${DEPTH:-}" = doctor ]; then
    slurm
    identity
    peers
    training
fi
echo 'facts end'
