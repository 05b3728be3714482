"""Machines with nothing but Debian 12 and sshd, each with its own root, network and process tree.

The root is made once by debootstrap and kept, bare, in the cache folder; a machine is an overlay
over it. Its packages come from a folder that is each machine's only apt source: the machines have
no connection to the outside.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CACHE = Path(
    os.environ.get("DDP_SLURM_RELEASES", Path.home() / ".cache" / "ddp_slurm" / "releases")
)
SUITE = "bookworm"
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "chrony", "openssh-server", "iproute2")
HIERARCHIES = ("cpuset", "memory", "devices", "freezer", "cpu", "cpuacct", "systemd")
CGROUPS = Path("/sys/fs/cgroup")

# In place of the driver's own tool.
NVIDIA_SMI = """#!/bin/sh
set -- "$1" /dev/nvidia[0-9]*
case $1 in --list-gpus | --query-gpu=index,pci.bus_id*) ;; *) exit 2 ;; esac
query=$1
shift
i=0
for device in "$@"; do
    [ -c "$device" ] || continue
    if [ "$query" = --list-gpus ]; then echo "GPU $i: NVIDIA A100 (UUID: GPU-$i)"
    else echo "$i, 00000000:0$i:00.0, 40960, 535.183.01, NVIDIA A100-SXM4-40GB"; fi
    i=$((i + 1))
done
"""

# Runs as process 1 of its namespaces:
# $1 lower $2 upper $3 work $4 root $5 packages $6 host name $7 GPUs $8 cgroup hierarchies
INIT = r"""
set -eu
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$4"
cd "$4"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
mount -t tmpfs -o mode=755 tmpfs run
mkdir -p dev/pts dev/shm run/sshd srv/packages
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/zero c 1 5
mknod -m 666 dev/random c 1 8
mknod -m 666 dev/urandom c 1 9
ln -s /proc/self/fd dev/fd
i=0; while [ "$i" -lt "$7" ]; do mknod -m 666 "dev/nvidia$i" c 195 "$i"; i=$((i + 1)); done
mount --bind "$5" srv/packages
mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
for c in $8; do
    mkdir "sys/fs/cgroup/$c"
    if [ "$c" = systemd ]; then o=none,name=systemd; else o=$c; fi
    mount -t cgroup -o "$o" cgroup "sys/fs/cgroup/$c"
done
hostname "$6"
echo "$6" >etc/hostname
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$6" >etc/hosts
ip link set lo up
exec setpriv --bounding-set -sys_time --inh-caps -sys_time \
    chroot . /bin/bash -c '/usr/sbin/sshd -D -e & echo up; wait'
"""


def bare_root(
    name: str = f"bare-{SUITE}",
    include: tuple[str, ...] = ("openssh-server", "iproute2"),
    wanted: tuple[str, ...] = PACKAGES,
) -> tuple[Path, Path]:
    """The cached root and the folder of packages, made on first use.

    ``include`` is in the root, ``wanted`` in the folder. Skips the test, with the reason, where
    they cannot be fetched.
    """
    root, packages = CACHE / name, CACHE / f"{name}-packages"
    if root.is_dir() and packages.is_dir():
        return root, packages
    for tool in ("debootstrap", "dpkg-deb"):
        if shutil.which(tool) is None:
            pytest.skip(f"bare Debian machines: {tool} is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{name}.") as folder:
        draft = Path(folder) / "root"
        made = quiet(
            [
                "debootstrap",
                "--variant=minbase",
                f"--include={','.join(include)}",
                SUITE,
                str(draft),
            ]
        )
        if made.returncode != 0:
            pytest.skip(
                f"bare Debian machines: debootstrap cannot fetch {SUITE}: {_last_line(made.stdout)}"
            )
        fetched = Path(folder) / "packages"
        _fetch_packages(draft, fetched, wanted)
        os.rename(fetched, packages)
        os.rename(draft, root)
    return root, packages


def _fetch_packages(root: Path, folder: Path, wanted: tuple[str, ...]) -> None:
    """Download what the installer needs and make it the root's only apt source.

    Otherwise the root stays unchanged.
    """
    install = ["apt-get", "-y", "--no-install-recommends", "--download-only", "install", *wanted]
    for command in (["apt-get", "-q", "update"], install):
        done = quiet(["chroot", str(root), *command])
        if done.returncode != 0:
            pytest.skip(
                f"bare Debian machines: apt cannot fetch packages: {_last_line(done.stdout)}"
            )
    folder.mkdir()
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        shutil.move(package, folder / package.name)
    write_index(folder)
    (root / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/srv/packages ./\n")
    shutil.rmtree(root / "var/lib/apt/lists")
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)


def write_index(folder: Path) -> None:
    """Make a folder of packages a source of apt."""
    (folder / "Packages").write_text("\n".join(map(_index_entry, sorted(folder.glob("*.deb")))))


def _index_entry(package: Path) -> str:
    """A package's paragraph of the file Packages, where apt finds it.

    Source: wiki.debian.org/DebianRepository/Format.
    """
    control = subprocess.run(
        ["dpkg-deb", "-f", str(package)], capture_output=True, text=True, check=True
    ).stdout
    content = package.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    return f"{control}Filename: ./{package.name}\nSize: {len(content)}\nSHA256: {checksum}\n"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


def quiet(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


class Machines:
    """Running machines. Put ``ssh_folder`` first on PATH: its ssh accepts their keys."""

    def __init__(self, folder: Path, network: int, gpus: dict[str, int]) -> None:
        """``gpus``: device files a machine; ``network``: the third number of 198.18.x.0/24."""
        self.folder, self.gpus, self.network = folder, gpus, network
        self.bridge = f"bm{network}"
        self.pids: dict[str, int] = {}
        self._processes: list[subprocess.Popen[str]] = []

    def address(self, name: str) -> str:
        return f"198.18.{self.network}.{list(self.gpus).index(name) + 1}"

    @property
    def identity(self) -> Path:
        return self.folder / "id"

    @property
    def ssh_folder(self) -> Path:
        return self.folder / "bin"

    def up(self) -> None:
        self._make_ssh()
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"198.18.{self.network}.254/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for name in self.gpus:
            self._boot(name)

    def _make_ssh(self) -> None:
        self.ssh_folder.mkdir(parents=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.identity)], check=True
        )
        client = self.ssh_folder / "ssh"
        client.write_text(
            f"#!/bin/sh\nexec {shutil.which('ssh')} -F /dev/null -o StrictHostKeyChecking=no "
            f"-o UserKnownHostsFile='{self.folder}/known_hosts' \"$@\"\n"
        )
        client.chmod(stat.S_IRWXU)

    def _boot(self, name: str) -> None:
        root, packages = bare_root()
        layers = [self.folder / name / layer for layer in ("upper", "work", "root")]
        for layer in layers:
            layer.mkdir(parents=True)
        keys = layers[0] / "root/.ssh/authorized_keys"
        keys.parent.mkdir(parents=True, mode=0o700)
        layers[0].joinpath("root").chmod(0o700)
        shutil.copy(f"{self.identity}.pub", keys)
        tool = layers[0] / "usr/local/bin/nvidia-smi"
        tool.parent.mkdir(parents=True)
        tool.write_text(NVIDIA_SMI)
        tool.chmod(0o755)
        for hierarchy in HIERARCHIES:
            make_cgroup(CGROUPS / hierarchy / self._cgroup(name))
        procs = f"{CGROUPS}/$h/{self._cgroup(name)}/cgroup.procs"
        enter = f"for h in {' '.join(HIERARCHIES)}; do echo $$ >{procs}; done; "
        # it is killed together with the tests
        spaces = (
            "exec setpriv --pdeathsig KILL unshare --fork --kill-child "
            "--pid --mount --uts --ipc --net --cgroup -- "
        )
        arguments = [root, *layers, packages, name, self.gpus[name], " ".join(HIERARCHIES)]
        process = subprocess.Popen(
            [
                "sh",
                "-c",
                enter + spaces + '"$@"',
                "sh",
                "sh",
                "-c",
                INIT,
                "init",
                *map(str, arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{name}.log").open("w"),
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise RuntimeError((self.folder / f"{name}.log").read_text())
        (init,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self.pids[name] = int(init)
        self._connect(name)

    def _connect(self, name: str) -> None:
        link = f"{self.bridge}-{len(self.pids)}"  # known by its number in down()
        ip(
            "link",
            "add",
            link,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(self.pids[name]),
        )
        ip("link", "set", link, "master", self.bridge, "up")
        self.exec(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        self.exec(name, "ip", "link", "set", "eth0", "up")

    def _cgroup(self, name: str) -> str:
        return f"{self.bridge}-{name}"

    def exec(self, name: str, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command inside a machine, not through its network."""
        spaces = [
            "nsenter",
            "-t",
            str(self.pids[name]),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "-C",
            "-r",
            "-w",
        ]
        return subprocess.run([*spaces, *command], capture_output=True, text=True, check=False)

    def down(self) -> None:
        """Process 1 ends its machine's processes, mounts and network; this removes the rest."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(timeout=60)
        # The kernel drops a dead network namespace and the links' names only later.
        for number in range(1, len(self.gpus) + 1):
            ip("link", "del", f"{self.bridge}-{number}", check=False)
        ip("link", "del", self.bridge, check=False)
        for name in self.gpus:
            for hierarchy in HIERARCHIES:
                remove_cgroup(CGROUPS / hierarchy / self._cgroup(name))
            if (self.folder / name).exists():
                shutil.rmtree(self.folder / name)  # a system's files: too much for pytest to keep


def make_cgroup(path: Path) -> None:
    path.mkdir()
    for setting in ("cpuset.cpus", "cpuset.mems"):  # a new cpuset is empty and takes no process
        if (path / setting).exists():
            (path / setting).write_text((path.parent / setting).read_text())


def remove_cgroup(path: Path) -> None:
    """Also those that slurmd made in it. Does nothing where it was not made."""
    for folder, _, _ in os.walk(path, topdown=False):
        os.rmdir(folder)


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


@contextlib.contextmanager
def machines(folder: Path, network: int, gpus: dict[str, int]) -> Iterator[Machines]:
    """Machines that are removed, with all that they ran and mounted, when the block ends."""
    if os.geteuid() != 0:
        pytest.skip("bare Debian machines: needs root")
    if not all((CGROUPS / hierarchy / "tasks").exists() for hierarchy in HIERARCHIES):
        pytest.skip("bare Debian machines: needs the cgroup v1 hierarchies")
    running = Machines(folder, network, gpus)
    try:
        running.up()
        yield running
    finally:
        running.down()
