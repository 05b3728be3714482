#!/bin/sh
# A separate machine, set up from users' files as in the guide. Run it under unshare with new network, mount, uts and pid
# namespaces: all of it ends with this script. Slurm's and munge's files and /dev are replaced by new ones.
#
# usage: machine.sh NAME ADDRESS ROOT CONF OUT COMMAND...
#   ROOT  root folder of the system whose programs are run, / for this one
#   CONF  folder with slurm.conf and its companions, for the controller; slurmd has to fetch them
#   OUT   folder for logs
set -eu
name=$1 address=$2 root=$3 conf=$4 out=$5
shift 5

hostname "$name"
ip link set lo up
ip address add "$address/24" dev lo
printf '127.0.0.1 localhost\n%s %s\n' "$address" "$name" >"$out/hosts"
printf 'passwd: files\ngroup: files\nhosts: files\n' >"$out/nsswitch.conf"
mount --bind "$out/hosts" "$root/etc/hosts"
mount --bind "$out/nsswitch.conf" "$root/etc/nsswitch.conf"

mkdir "$out/dev"
mount -t tmpfs tmpfs "$out/dev"
for device in null zero full random urandom tty; do cp -a "/dev/$device" "$out/dev/"; done
mkdir "$out/dev/shm"
ln -s /proc/self/fd "$out/dev/fd"
mknod "$out/dev/nvidia0" c 195 0
mknod "$out/dev/nvidia1" c 195 1
if [ "$root" != / ]; then
    mount --rbind /proc "$root/proc"
    mount --rbind /sys "$root/sys"
fi
mount --rbind "$out/dev" "$root/dev"

for folder in var/lib/slurm var/log/slurm run etc/slurm etc/munge var/lib/munge var/log/munge; do
    mkdir -p "$root/$folder"
    mount -t tmpfs -o mode=755 tmpfs "$root/$folder"
done
mkdir "$root/run/lock" "$root/run/munge" "$root/var/lib/slurm/slurmctld" "$root/var/lib/slurm/slurmd"
cp "$conf"/* "$root/etc/slurm/"
head -c 1024 /dev/urandom >"$root/etc/munge/munge.key"
chmod 400 "$root/etc/munge/munge.key"
chmod 700 "$root/etc/munge" "$root/var/lib/munge" "$root/var/log/munge"
chroot "$root" chown -R munge: /etc/munge /run/munge /var/lib/munge /var/log/munge
chroot "$root" chown -R slurm: /var/lib/slurm /var/log/slurm

inside() { chroot "$root" "$@"; }

wait_until() { # SECONDS COMMAND...
    tenths=${1}0
    shift
    until "$@" >/dev/null 2>&1; do
        tenths=$((tenths - 1))
        if [ "$tenths" -le 0 ]; then
            echo "not true in time: $*" >&2
            return 1
        fi
        sleep 0.1
    done
}
# shellcheck disable=SC2317 # wait_until calls it
is_idle() { inside scontrol -o show node "$name" | grep -q ' State=IDLE '; }

# MariaDB as slurmdbd.conf describes it, with the settings that slurmdbd asks for. As root: the user mysql exists only
# where the package mariadb-server was installed once.
database() {
    for folder in var/lib/mysql run/mysqld; do
        mkdir -p "$root/$folder"
        mount -t tmpfs tmpfs "$root/$folder"
    done
    chmod 600 "$root/etc/slurm/slurmdbd.conf"
    inside chown slurm: /etc/slurm/slurmdbd.conf
    inside mariadb-install-db --user=root --auth-root-authentication-method=socket >/dev/null
    inside mariadbd --user=root --skip-networking --innodb-buffer-pool-size=4G --innodb-lock-wait-timeout=900 \
        --innodb-flush-log-at-trx-commit=0 --skip-log-bin --innodb-doublewrite=0 \
        >"$out/mariadb.txt" 2>&1 &
    wait_until 60 inside mariadb -e 'SELECT 1'
    sed -n "s/^# *\(CREATE DATABASE.*\)/\1/p" "$root/etc/slurm/slurmdbd.conf" | inside mariadb
    inside slurmdbd
    wait_until 30 inside sacctmgr --noheader show cluster
}

status=0
{
    inside setpriv --reuid munge --regid munge --clear-groups munged &&
        if [ -e "$conf/slurmdbd.conf" ]; then database; fi &&
        inside slurmctld && # it switches to SlurmUser itself, as under systemd
        wait_until 30 inside scontrol ping &&
        inside slurmd --conf-server "$address" &&
        wait_until 60 is_idle &&
        inside "$@"
} || status=$?
cp "$root"/var/log/slurm/* "$out/"
exit "$status"
