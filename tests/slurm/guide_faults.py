"""Faults of machines that a guide's reader may have, what the doctor reports, and what cures them.

Planted in batches: the faults of one batch do not hide each other.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """Commands run by a user who may use sudo."""

    node: str
    """Or several."""
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


RESTART = "sudo reboot"
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
VENV = "/opt/ddp/venv/bin/python"
TORCH = (
    Fault(
        "alpha beta gamma",
        f"{VENV} -m pip install torch==1.0",
        "torch's CUDA",
        f"{VENV} has a torch for CPUs only",
        f"on all nodes: {VENV} -m pip install --force-reinstall torch torchvision",
        f"{VENV} -m pip install --force-reinstall torch torchvision",
    ),
)
ENVIRONMENT = (
    Fault(
        "beta",
        "sudo sed -i s/580.95.05/535.183.01/ /usr/bin/nvidia-smi",
        "torch's CUDA",
        "CUDA 13.0 needs driver 580 or later, 535.183.01 is installed",
        "a newer driver, or on all nodes:",
        "sudo apt-get install --reinstall -y nvidia-utils-580-server",
    ),
    Fault(
        "beta",
        f"{VENV} -m pip uninstall -y ddp_slurm",
        "torch",
        f"{VENV} does not have ddp_slurm",
        f"{VENV} -m pip install '.[train]' in the package's folder",
        f"cd /opt/ddp/ddp_slurm; {VENV} -m pip install '.[train]'; cd",
    ),
    Fault(
        "gamma",
        "mv /opt/ddp/venv /opt/ddp/away",
        "torch",
        f"{VENV} does not run",
        "the same environment on all nodes, under the same path",
        "rsync -a --delete /opt/ddp/ ops@gamma:/opt/ddp/",
        "alpha",
    ),
)
STARTS = (
    Fault(
        "beta",
        "sudo sed -i s/:6817/:6999/ /etc/default/slurmd; sudo systemctl restart slurmd; "
        "until systemctl is-failed slurmd; do sleep 1; done",
        "slurmd",
        "slurmd is not running; its last error: ",
        "ddp-slurm cluster install --step slurmd",
        f"{INSTALL} --step slurmd --node beta",
        "alpha",
    ),
    Fault(
        "beta",
        "sudo chmod 755 /etc/munge; sudo chmod 644 /etc/munge/munge.key",
        "munge key",
        "munge.key has mode 644: others can read it",
        "ddp-slurm cluster install --step munge",
        f"{INSTALL} --step munge",
        "alpha",
    ),
    Fault(
        "gamma",
        "sudo systemctl stop munge",
        "munge key",
        "munged is not running",
        "ddp-slurm cluster install --step munge --node gamma",
        f"{INSTALL} --step munge --node gamma",
        "alpha",
    ),
    Fault(
        "gamma",
        "sudo sed -i '/ beta$/d' /etc/hosts",
        "name resolution",
        "the name beta has no address here",
        "ddp-slurm cluster install --step hosts",
        f"{INSTALL} --step hosts",
        "alpha",
    ),
)
REPORTED = (
    Fault(  # github.com/dun/munge/issues/51
        "gamma",
        "sudo chown root: /var/log/munge; sudo systemctl restart munge || true",
        "munge key",
        "munged is not running",
        "ddp-slurm cluster install --step munge --node gamma",
        f"{INSTALL} --step munge --node gamma",
        "alpha",
    ),
    Fault(  # github.com/clustervision/trinityX/issues/54
        "gamma",
        "sudo rm /etc/systemd/system/slurmd.service.d/ddp-slurm.conf; "
        "sudo systemctl daemon-reload; sudo systemctl restart slurmd",
        "slurmd",
        "ConditionPathExists=/etc/slurm/slurm.conf",
        "ddp-slurm cluster install --step slurmd",
        f"{INSTALL} --step slurmd --node gamma",
        "alpha",
    ),
    Fault(  # github.com/BiBiServ/bibigrid/issues/705
        "beta",
        "sudo rm /dev/nvidia0; sudo systemctl restart slurmd; "
        "until systemctl is-failed slurmd; do sleep 1; done",
        "slurmd",
        "can't stat gres.conf file /dev/nvidia0",
        "ddp-slurm cluster install --step slurmd",
        "sudo mknod -m 666 /dev/nvidia0 c 195 0; sudo systemctl start slurmd",
    ),
)
CONFIGURATION = (
    Fault(
        "gamma",
        "sudo systemctl stop ssh",
        "reachable",
        "Connection refused",
        "start it, or correct address and ssh in cluster.yaml",
        "sudo systemctl start ssh",
    ),
    Fault(
        "beta",
        "sudo cp /run/slurm/conf/slurm.conf /etc/slurm/; "
        "echo KillWait=31 | sudo tee -a /etc/slurm/slurm.conf",
        "configuration",
        "slurm.conf differs from the one slurmctld runs with",
        "nodes need no copy of their own",
        f"{INSTALL} --step slurmctld --step slurmd",
        "alpha",
    ),
    Fault(
        "alpha",
        "sudo sed -i '/^NodeName=beta/s/RealMemory=[0-9]*/RealMemory=900000/' "
        "/etc/slurm/slurm.conf; sudo systemctl restart slurmctld",
        "hardware",
        "slurm.conf has 900000 MiB of memory, the machine",
        "ddp-slurm cluster install",
        f"{INSTALL} --step slurmctld --step slurmd",
    ),
    Fault(
        "alpha",
        "until sinfo -R | grep 'Low RealMemory'; do sleep 1; done",
        "node states",
        "Low RealMemory",
        "slurm.conf has more memory than the machine",
        f"{INSTALL} --step nodes",
    ),
)
HARDWARE = (
    Fault(
        "alpha",
        "sudo cp /etc/cards /var/tmp; sudo sed -i 2d /etc/cards",
        "GPU count",
        "cluster.yaml has 2 GPUs, nvidia-smi shows 1",
        "look for the missing card (dmesg)",
        "sudo cp /var/tmp/cards /etc",
    ),
    Fault(
        "beta",
        "sudo sed -i s/580.95.05/570.86.10/ /usr/bin/nvidia-smi",
        "driver branch",
        "different driver branches: 580 on alpha",
        "one branch on all nodes",
        "sudo apt-get install --reinstall -y nvidia-utils-580-server",
    ),
    Fault(
        "beta",
        "printf '#!/bin/sh\\necho slurm-wlm 21.08.5\\n' | sudo tee /usr/local/bin/slurmd; "
        "sudo chmod +x /usr/local/bin/slurmd",
        "Slurm release",
        "21.08.5 on beta",
        "install one release on all nodes",
        "sudo rm /usr/local/bin/slurmd",
    ),
    Fault(  # a machine's clock is the host's here
        "gamma",
        'printf \'#!/bin/sh\\nexec /usr/bin/date -d "90 seconds" "$@"\\n\' | '
        "sudo tee /usr/local/bin/date; sudo chmod +x /usr/local/bin/date",
        "clock",
        "the clock is 90 s ahead of the other nodes'",
        "ddp-slurm cluster install --step clock",
        "sudo rm /usr/local/bin/date",
    ),
    Fault(
        "gamma",
        "sudo touch /run/driver-upgraded",
        "GPU driver",
        "Driver/library version mismatch",
        "drain gamma and restart it",
        RESTART,
    ),
)
PEOPLE = (
    Fault(
        "gamma",
        "sudo usermod -u 2999 ann",
        "users",
        "user ann has different ids: 2001 on alpha, beta, 2999, group 2001 on gamma",
        "usermod -u ID ann",
        "sudo usermod -u 2001 ann",
    ),
    Fault(
        "alpha gamma",
        "sudo useradd --create-home --uid 2002 --shell /bin/bash bob",
        "users",
        "user bob (id 2002) does not exist",
        "useradd -u ID bob",
        "id bob || sudo useradd --create-home --uid 2002 --shell /bin/bash bob",
        "beta",
    ),
    Fault(
        "alpha",
        "sudo mount -t tmpfs -o size=4M,mode=755,uid=$(id -u slurm) tmpfs /var/lib/slurm/slurmctld",
        "disks",
        "less than 100 MiB are free on /var/lib/slurm/slurmctld",
        "du -xh",
        "sudo umount /var/lib/slurm/slurmctld",
    ),
)
BATCHES = {
    "torch": TORCH,
    "environment": ENVIRONMENT,
    "starts": STARTS,
    "reported": REPORTED,
    "configuration": CONFIGURATION,
    "hardware": HARDWARE,
    "people": PEOPLE,
    "files": FILES,
    "slurm": SLURM,
    "daemons": DAEMONS,
    "devices": DEVICES,
    "controller": CONTROLLER,
}
