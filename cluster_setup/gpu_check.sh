#!/bin/sh
# Slurm's HealthCheckProgram: drains this node when fewer GPUs answer than slurm.conf promises, and takes it back when
# they are there again. slurmd runs it as root; see HealthCheckProgram in slurm.conf(5). Copy it to the same path on all
# nodes and name it: ddp-slurm cluster configs --health-check /usr/local/sbin/gpu_check.sh

LC_ALL=C
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # slurmd gives it none
export LC_ALL PATH
node=${SLURMD_NODENAME:-$(hostname -s)}
mark='gpu_check:'

record=$(scontrol -o show node "$node") || exit 1

# gpu:a100:4(S:0,2),gpu:titan:1,mps:400 -> 5
expected=$(printf '%s\n' "$record" | sed -n 's/.* Gres=\([^ ]*\) .*/\1/p' | sed 's/([^)]*)//g' | tr ',' '\n' |
    awk -F: '$1 == "gpu" { count += $NF } END { print count + 0 }')

if command -v nvidia-smi >/dev/null 2>&1; then
    # A card that fell off the bus makes nvidia-smi hang or fail as a whole. slurmd ends this program itself after 60 s.
    found=$(timeout -k 5 30 nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ')
else
    found=$(find /dev/dri -name 'renderD*' -type c 2>/dev/null | wc -l)
fi

case $record in
    *" Reason=$mark"*) drained_here=yes ;;
    *) drained_here=no ;;
esac
if [ "$found" -lt "$expected" ]; then
    case $record in *DRAIN* | *" State=DOWN"*) exit 0 ;; esac # the reason that is there stays
    scontrol update "NodeName=$node" State=DRAIN "Reason=$mark $found of $expected GPUs answer"
elif [ "$drained_here" = yes ]; then
    scontrol update "NodeName=$node" State=RESUME
fi
