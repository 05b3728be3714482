#!/bin/sh
# Slurm's HealthCheckProgram: drains this node when fewer GPUs respond than slurm.conf has, and resumes it when they are
# back. slurmd runs it as root; see HealthCheckProgram in slurm.conf(5). Copy it to the same path on all nodes and
# configure it: ddp-slurm cluster configs --health-check /usr/local/sbin/gpu_check.sh

LC_ALL=C
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # slurmd gives it none
export LC_ALL PATH
node=${SLURMD_NODENAME:-$(hostname -s)}
mark='gpu_check:'

# From sinfo, field by field: in scontrol's record a reason or comment may look like another field. A line a partition.
record=$(sinfo --noheader --all --Node --nodes="$node" --format='%G|%T|%E') || exit 1
record=$(printf '%s\n' "$record" | head -n 1)
gres=${record%%|*}
state_and_reason=${record#*|}
state=${state_and_reason%%|*}
reason=${state_and_reason#*|}

# A node that Slurm is switching off or on has no GPUs yet, and power saving must not lose its flags.
case $state in *[~#!%^] | *power* | *boot*) exit 0 ;; esac

# gpu:a100:4(S:0,2),gpu:titan,mps:400 -> 5: without parentheses; the last word is the count, without a number it is 1.
expected=$(printf '%s\n' "$gres" | sed 's/([^)]*)//g;s/:no_consume//g' | tr ',' '\n' | awk -F: '
    $1 == "gpu" { count += NF > 1 && $NF ~ /^[0-9]+$/ ? $NF : 1 }
    END { print count + 0 }')

# Cards, and in place of a card that is divided (MIG) its instances: these are what Slurm counts. A divided card without
# instances cannot be used. Drivers before 450 do not know the second query.
list_gpus='nvidia-smi --list-gpus; nvidia-smi --query-gpu=index,mig.mode.current --format=csv,noheader'
count_gpus() {
    awk '
        /^GPU [0-9]+:/ { card = $2 + 0; instances[card] += 0 }
        /^ +MIG / { instances[card]++ }
        /^[0-9]+, *Enabled/ { divided[$1 + 0] = 1 }
        END {
            for (card in instances) count += instances[card] || card in divided ? instances[card] : 1
            print count + 0
        }'
}

if command -v nvidia-smi >/dev/null 2>&1; then
    # A card that fell off the bus makes nvidia-smi hang or fail as a whole. slurmd kills this program after 60 s.
    found=$(timeout -k 5 30 sh -c "$list_gpus" 2>/dev/null | count_gpus)
else
    found=$(find /dev/dri -name 'renderD*' -type c 2>/dev/null | wc -l)
fi

case $reason in
"$mark"*) drained_here=yes ;;
*) drained_here=no ;;
esac
if [ "$found" -lt "$expected" ]; then
    case $state in *dr* | *down* | *fail*) exit 0 ;; esac # the existing reason stays
    scontrol update "NodeName=$node" State=DRAIN "Reason=$mark $found of $expected GPUs respond"
elif [ "$drained_here" = yes ]; then
    scontrol update "NodeName=$node" State=RESUME
fi
