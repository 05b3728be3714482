"""Faults of machines that a guide's reader may have, what the doctor reports, and what cures them.

Planted in batches: the faults of one batch do not hide each other.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """Commands run by a user who may use sudo."""

    node: str
    plant: str
    check: str
    """The doctor's."""
    cause: str
    """A part of what it reports."""
    fix: str
    """A part of what it advises."""
    cure: str
    cured_on: str = ""
    """Where the cure runs; "" is the node."""


INSTALL = "cd /opt/ddp/ddp_slurm; ddp-slurm cluster install"
CLUSTER = "/opt/ddp/ddp_slurm/cluster.yaml"
PROBE = f"ddp-slurm cluster probe --cluster {CLUSTER} --yes"

FILES = (
    Fault(
        "beta",
        "sudo mv /home/ann /home/ann.away",
        "users",
        "home folder /home/ann of ann does not exist",
        "install -d -m 750 -o ann -g $(id -g ann) /home/ann",
        "sudo install -d -m 750 -o ann -g $(id -g ann) /home/ann",
    ),
    Fault(
        "beta",
        "sudo groupmod -g 2999 ann",
        "users",
        "2001, group 2999 on beta",
        "groupmod -g ID ann",
        "sudo groupmod -g 2001 ann",
    ),
    Fault(
        "gamma",
        "sudo ip link set eth0 mtu 1400",
        "packet size",
        "different MTU",
        "ip link set INTERFACE mtu N",
        "sudo ip link set eth0 mtu 1500",
    ),
    Fault(
        "gamma",
        "sudo prlimit --pid $(pidof slurmd) --nofile=256:256",
        "limits",
        "limit open files of 256",
        "systemctl restart slurmd",
        "sudo systemctl restart slurmd",
    ),
    Fault(
        "beta",
        "sudo prlimit --pid $(pidof slurmd) --memlock=65536:65536",
        "limits",
        "limit locked memory of 65536",
        "systemctl restart slurmd",
        "sudo systemctl restart slurmd",
    ),
    Fault(
        "beta",
        "sudo mount -t tmpfs -o noexec,mode=1777 tmpfs /tmp",
        "temporary folders",
        "/tmp is mounted noexec",
        "mount -o remount,exec /tmp",
        "sudo mount -o remount,exec /tmp",
    ),
    Fault(
        "beta",
        "sudo mount -o remount,size=64M /dev/shm",
        "temporary folders",
        "/dev/shm has 64 MiB",
        "mount -o remount,size=50% /dev/shm",
        "sudo mount -o remount,size=50% /dev/shm",
    ),
    Fault(
        "gamma",
        "sudo mount -t tmpfs -o size=4M tmpfs /var/spool",
        "disks",
        "less than 100 MiB are free on /var/spool",
        "du -xh",
        "sudo umount /var/spool",
    ),
    Fault(
        "beta",
        "sudo sed -i '1i 192.168.8.99 gamma' /etc/hosts",
        "name resolution",
        "the name gamma has different addresses",
        "delete line 1 of /etc/hosts, which wins: 192.168.8.99 gamma",
        "sudo sed -i 1d /etc/hosts",
    ),
    Fault(
        "gamma",
        "sudo cp /etc/resolv.conf /var/tmp/resolv; "
        "echo nameserver 192.168.8.250 | sudo tee /etc/resolv.conf",
        "DNS",
        "no answer for 5 s from the DNS server: 192.168.8.250",
        "/etc/resolv.conf",
        "sudo cp /var/tmp/resolv /etc/resolv.conf",
    ),
)
SLURM = (
    Fault(
        "alpha",
        'sudo scontrol update "partition=$(sinfo -h -o %R | head -n 1)" state=down',
        "partitions",
        "is DOWN: its jobs wait",
        "state=up",
        'sudo scontrol update "partition=$(sinfo -h -a -o %R | head -n 1)" state=up',
    ),
    Fault(
        "alpha",
        "sudo scontrol create reservation reservationname=r starttime=now duration=60 "
        "users=root nodes=gamma; "
        "until scontrol show node gamma | grep -q RESERVED; do sleep 1; done",
        "reservations",
        "only jobs of a reservation",
        "scontrol delete reservationname=NAME",
        "sudo scontrol delete reservationname=r",
    ),
    Fault(
        "alpha",
        "sudo scontrol update nodename=beta state=drain reason=fan",
        "node states",
        "DRAIN: fan (by",
        "scontrol update nodename=beta state=resume",
        "sudo scontrol update nodename=beta state=resume",
    ),
    Fault(
        "alpha",
        f"cp {CLUSTER} /var/tmp/; sed -i 's/type: a100/type: a30/' {CLUSTER}",
        "GPU types",
        "cluster.yaml has GPUs of type 'a30', slurm.conf of a100",
        "the same type in both",
        f"sed -i 's/type: a30/type: a100/' {CLUSTER}",
    ),
    Fault(
        "alpha",
        f"sed -i 's/^  - name: gamma.*/&\\n    partition: fast/' {CLUSTER}",
        "partitions",
        "partition 'fast' of cluster.yaml is not in Slurm",
        "correct cluster.yaml",
        f"sed -i '/partition: fast/d' {CLUSTER}",
    ),
    Fault(
        "alpha",
        f"sed -i '/name: beta/,/name: gamma/s/interface: eth0/interface: eth7/' {CLUSTER}",
        "interface",
        "interface 'eth7' does not exist; the machine has eth0",
        "ddp-slurm cluster probe",
        PROBE,
    ),
    Fault(
        "alpha",
        f"sed -i '/name: beta/,/name: gamma/s/memory: .*/memory: 900G/' {CLUSTER}",
        "hardware",
        "cluster.yaml has 921600 MiB of memory, the machine",
        "ddp-slurm cluster probe",
        PROBE,
    ),
)
DAEMONS = (
    Fault(
        "beta",
        "sudo systemctl stop slurmd",
        "slurmd",
        "slurmd is not running",
        "ddp-slurm cluster install --step slurmd",
        f"{INSTALL} --step slurmd --node beta",
        "alpha",
    ),
    Fault(
        "gamma",
        "head -c 1024 /dev/urandom | sudo tee /etc/munge/munge.key >/dev/null; "
        "sudo systemctl restart munge",
        "munge key",
        "another munge key than alpha",
        "ddp-slurm cluster install --step munge",
        f"{INSTALL} --step munge",
        "alpha",
    ),
    Fault(
        "beta",
        "sudo sed -i '1i 127.0.1.1 beta' /etc/hosts",
        "name resolution",
        "the name beta is 127.0.1.1 here",
        "ddp-slurm cluster install --step hosts",
        f"{INSTALL} --step hosts",
        "alpha",
    ),
    Fault(
        "gamma",
        "sudo ip route add blackhole 192.168.8.152",
        "firewall",
        "gamma gets no answer from beta on port",
        "allow the cluster's own network",
        "sudo ip route del blackhole 192.168.8.152",
    ),
)
DEVICES = (
    Fault(
        "beta",
        "sudo rm /dev/nvidia0",
        "device files",
        "gres.conf lists /dev/nvidia0, which does not exist; the machine has none",
        "nvidia-modprobe -u -c=N makes one",
        "sudo mknod -m 666 /dev/nvidia0 c 195 0",
    ),
    Fault(
        "alpha",
        "sudo sed -i 's/nvidia\\[0-1\\]/nvidia[0-2]/' /etc/slurm/gres.conf",
        "device files",
        "gres.conf lists /dev/nvidia2, which does not exist",
        "ddp-slurm cluster install",
        f"{INSTALL} --step slurmctld --step slurmd",
    ),
    Fault(
        "gamma",
        "sudo umount -l /sys/fs/cgroup/devices",
        "control groups",
        "the control group devices does not exist",
        "mount -t cgroup -o devices cgroup /sys/fs/cgroup/devices",
        "sudo mount -t cgroup -o devices cgroup /sys/fs/cgroup/devices",
    ),
    Fault(
        "gamma",
        "sudo mv /usr/bin/nvidia-smi /usr/bin/away",
        "GPU count",
        "GPUs are configured, but there is no nvidia-smi",
        "install the driver",
        "sudo mv /usr/bin/away /usr/bin/nvidia-smi",
    ),
)
CONTROLLER = (
    Fault(
        "alpha",
        "sudo systemctl stop slurmctld",
        "slurmctld",
        "slurmctld does not respond to any node",
        "systemctl status slurmctld",
        f"{INSTALL} --step slurmctld",
    ),
    Fault(
        "beta",
        "sudo hostnamectl set-hostname ubuntu",
        "host name",
        "the machine's host name is 'ubuntu'",
        "hostnamectl set-hostname beta",
        "sudo hostnamectl set-hostname beta",
    ),
    Fault(
        "gamma",
        "sudo chmod 0700 /run/munge",
        "munge key",
        "no permission for munge's socket /run/munge",
        "chmod 0755 /run/munge",
        "sudo chmod 0755 /run/munge; sudo systemctl restart munge",
    ),
)
BATCHES = {
    "files": FILES,
    "slurm": SLURM,
    "daemons": DAEMONS,
    "devices": DEVICES,
    "controller": CONTROLLER,
}
