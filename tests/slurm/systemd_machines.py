"""Machines as a system's installer leaves them: systemd as process 1, a user with a password.

A network of their own, with the addresses of the guide. Packages come from a folder, Python's from
this machine's own environment, and the GPUs and their driver are stand-ins: a package that looks
like Ubuntu's, whose service makes the device files at the machine's next start.
"""

import contextlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.waiting import wait_until

from .bare_machines import (
    CACHE,
    CGROUPS,
    PACKAGES,
    SUITE,
    bare_root,
    ip,
    make_cgroup,
    quiet,
    remove_cgroup,
    write_index,
)

NAME = f"systemd-{SUITE}"
INCLUDED = ("systemd-sysv", "dbus", "sudo", "openssh-server", "iproute2")
WANTED = (*PACKAGES, "python3-venv", "git", "rsync", "openssh-client")
HIERARCHIES = (
    *("cpuset", "memory", "devices", "freezer", "cpu", "cpuacct", "blkio", "pids"),
    *("systemd", "unified"),
)
USER, PASSWORD = "ops", "secret"  # pragma: allowlist secret

# In a container they fail, or look for devices that do not exist.
MASKED = (
    *("systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udevd-kernel.socket"),
    *("systemd-udevd-control.socket", "systemd-logind.service", "getty@.service"),
    *("console-getty.service", "getty.target"),
)

# Process 1 of its namespaces, until it is systemd:
# $1 lower $2 upper $3 work $4 root $5 packages $6 wheels $7 Python's packages $8 cgroup hierarchies
INIT = r"""
set -eu
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$4"
cd "$4"
mkdir -p old srv/packages srv/wheels srv/python
mount --bind -o ro "$5" srv/packages
mount --bind -o ro "$6" srv/wheels
mount --bind -o ro "$7" srv/python
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
mount -t tmpfs -o mode=755 tmpfs run
mkdir -p dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,gid=5,mode=620 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/zero c 1 5
mknod -m 666 dev/full c 1 7
mknod -m 666 dev/random c 1 8
mknod -m 666 dev/urandom c 1 9
mknod -m 666 dev/tty c 5 0
ln -s /proc/self/fd dev/fd
# Read-only in the end, or systemd would mount the kernel's other hierarchies, which are this
# machine's. It wants to make their names, so these exist.
mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
mkdir sys/fs/cgroup/net_cls sys/fs/cgroup/net_prio
for c in $8; do
    mkdir "sys/fs/cgroup/$c"
    case $c in
    systemd) mount -t cgroup -o none,name=systemd cgroup "sys/fs/cgroup/$c" ;;
    unified) mount -t cgroup2 cgroup2 "sys/fs/cgroup/$c" ;;
    *) mount -t cgroup -o "$c" cgroup "sys/fs/cgroup/$c" ;;
    esac
done
mount -o remount,ro sys/fs/cgroup
hostname "$(cat etc/hostname)"
pivot_root . old
cd /
umount -l /old
exec setpriv --bounding-set -sys_time --inh-caps -sys_time \
    env -i container=lxc PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd \
    >/dev/null 2>&1 </dev/null
"""

UBUNTU_DRIVERS = """\
#!/bin/sh
case "$*" in
'list --gpgpu') echo 'nvidia-driver-580-server, (kernel modules provided by a stand-in)' ;;
'install --gpgpu nvidia:'*) touch /var/lib/driver-installed ;;
*) exit 2 ;;
esac
"""
# /etc/cards has a line a card: index|memory in MiB|compute capability|name
NVIDIA_SMI = r"""#!/bin/sh
[ -e /run/driver-upgraded ] && {
    echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18; }
[ -c /dev/nvidiactl ] || { echo 'NVIDIA-SMI has failed: no driver'; exit 9; }
while IFS='|' read -r index memory capability name; do
    [ -c "/dev/nvidia$index" ] || continue
    case ${1:-} in
    '') echo "$index $name" ;;
    --list-gpus) echo "GPU $index: $name (UUID: GPU-$index)" ;;
    --query-gpu=index,pci.bus_id*)
        echo "$index, 00000000:0$index:00.0, $memory, 580.95.05, $name" ;;
    --query-gpu=index,compute_cap) echo "$index, $capability" ;;
    *) exit 2 ;;
    esac
done </etc/cards
"""
DRIVER_UNIT = """\
[Unit]
ConditionPathExists=/var/lib/driver-installed
Before=slurmd.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'mknod -m 666 /dev/nvidiactl c 195 255; \
for i in $(cut -d"|" -f1 /etc/cards); do mknod -m 666 /dev/nvidia$i c 195 $i; done'
[Install]
WantedBy=multi-user.target
"""


def driver_packages(folder: Path) -> None:
    """Stand-ins for Ubuntu's packages of the driver."""
    _package(folder, "ubuntu-drivers-common", {"usr/bin/ubuntu-drivers": UBUNTU_DRIVERS})
    files = {
        "usr/bin/nvidia-smi": NVIDIA_SMI,
        "lib/systemd/system/nvidia-stand-in.service": DRIVER_UNIT,
        "DEBIAN/postinst": "#!/bin/sh\nsystemctl enable nvidia-stand-in.service\n",
    }
    _package(folder, "nvidia-utils-580-server", files)


def _package(folder: Path, name: str, files: Mapping[str, str]) -> None:
    draft = folder / f"{name}.draft"
    control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: tests\nDescription: t\n"
    for path, text in {"DEBIAN/control": control, **files}.items():
        (draft / path).parent.mkdir(parents=True, exist_ok=True)
        (draft / path).write_text(text)
        (draft / path).chmod(0o755 if text.startswith("#!") else 0o644)
    built = quiet(["dpkg-deb", "--build", "--root-owner-group", str(draft), str(folder)])
    assert built.returncode == 0, built.stdout


PYTHON_PACKAGES = ("jinja2", "numpy", "pyyaml", "rich", "torch", "torchvision")


def setuptools_wheel() -> Path:
    """pip's tool for building, which must be a real one; kept in the cache folder."""
    folder = CACHE / f"{NAME}-wheels"
    for wheel in folder.glob("setuptools-*.whl"):
        return wheel
    fetch = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "setuptools"]
    fetched = quiet([sys.executable, *fetch])
    if fetched.returncode != 0:
        pytest.skip(f"machines with systemd: pip cannot fetch setuptools: {fetched.stdout}")
    return next(folder.glob("setuptools-*.whl"))


TORCH_FOR_CPUS = """\
__version__ = "1.0"
class version:
    cuda = hip = None
class backends:
    class cudnn:
        version = staticmethod(lambda: None)
"""


def stand_in_wheels(folder: Path) -> None:
    """A wheel for each package, whose only file makes this machine's own copy importable.

    An older torch is built for CPUs only.
    """
    for name in PYTHON_PACKAGES:
        version = importlib.metadata.version(name)
        _wheel(folder, name, version, {f"{name}-stand-in.pth": "/srv/python\n"})
    _wheel(folder, "torch", "1.0", {"torch/__init__.py": TORCH_FOR_CPUS})


def _wheel(folder: Path, name: str, version: str, content: Mapping[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        **content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


class SystemdMachines:
    """Running machines, each on one network under the addresses of ``addresses``."""

    def __init__(
        self, folder: Path, addresses: Mapping[str, str], cards: Mapping[str, str]
    ) -> None:
        """``cards``: the text of /etc/cards of each machine."""
        self.folder, self.addresses, self.cards = folder, addresses, cards
        self.network = f"sm{os.getpid()}"
        self.pids: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        root, packages = bare_root(NAME, INCLUDED, WANTED)
        own = self.folder / "packages"
        own.mkdir()
        driver_packages(own)
        for package in packages.glob("*.deb"):
            (own / package.name).symlink_to(package)  # read only here, for the index
        write_index(own)
        for link in [path for path in own.iterdir() if path.is_symlink()]:
            target = link.resolve()
            link.unlink()
            os.link(target, link)
        wheels = self.folder / "wheels"
        wheels.mkdir()
        stand_in_wheels(wheels)
        shutil.copy(setuptools_wheel(), wheels)
        ip("netns", "add", self.network)
        ip("-n", self.network, "link", "add", "lan", "type", "bridge")
        ip("-n", self.network, "link", "set", "lan", "up")
        for name in self.addresses:
            self._install(name, root)
            self.boot(name)

    def _install(self, name: str, root: Path) -> None:
        """What the system's installer does: host name, user, network, sources of packages."""
        upper, work, mounted = (self.folder / name / layer for layer in ("upper", "work", "root"))
        for layer in (upper, work, mounted):
            layer.mkdir(parents=True)
        overlay = f"lowerdir={root},upperdir={upper},workdir={work}"
        script = f"""
            mount -t overlay overlay -o {overlay} {mounted}
            cd {mounted}
            echo {name}-fresh >etc/hostname
            printf '127.0.0.1 localhost\\n127.0.1.1 {name}-fresh\\n' >etc/hosts
            chroot . useradd --create-home --uid 1000 --shell /bin/bash --groups sudo,adm {USER}
            echo {USER}:{PASSWORD} | chroot . chpasswd
            for unit in {" ".join(MASKED)}; do ln -sf /dev/null etc/systemd/system/$unit; done
            rm -f etc/ssh/ssh_host_* etc/machine-id
            chroot . ssh-keygen -A >/dev/null
            : >etc/machine-id
        """
        subprocess.run(
            ["unshare", "--mount", "sh", "-euc", textwrap.dedent(script)],
            check=True,
            capture_output=True,
        )
        (upper / "etc/cards").write_text(self.cards[name])
        (upper / "etc/pip.conf").write_text(
            "[global]\nno-index = true\nfind-links = /srv/wheels /usr/share/python-wheels\n"
            "disable-pip-version-check = true\n"
        )
        answers = upper / "usr/local/bin/answer"
        answers.parent.mkdir(parents=True, exist_ok=True)
        answers.write_text(
            f"#!/bin/sh\ncase $1 in *yes/no*) echo yes ;; *) echo {PASSWORD} ;; esac\n"
        )
        answers.chmod(0o755)

    def boot(self, name: str) -> None:
        root, _ = bare_root(NAME, INCLUDED, WANTED)
        for hierarchy in HIERARCHIES:
            make_cgroup(CGROUPS / hierarchy / self._cgroup(name))
        procs = f"{CGROUPS}/$h/{self._cgroup(name)}/cgroup.procs"
        enter = f"for h in {' '.join(HIERARCHIES)}; do echo $$ >{procs}; done; "
        # it is killed together with the tests
        spaces = (
            "exec setpriv --pdeathsig KILL unshare --fork --kill-child "
            "--pid --mount --uts --ipc --net --cgroup -- "
        )
        python = Path(importlib.metadata.distribution("torch").locate_file("")).resolve()
        layers = [self.folder / name / layer for layer in ("upper", "work", "root")]
        arguments = [root, *layers, self.folder / "packages", self.folder / "wheels", python]
        command = ["sh", "-c", enter + spaces + '"$@"', "sh", "sh", "-c", INIT, "init"]
        log = (self.folder / f"{name}.log").open("w")
        process = subprocess.Popen(
            [*command, *map(str, arguments), " ".join(HIERARCHIES)], stdout=log, stderr=log
        )
        self._processes[name] = process
        wait_until(lambda: _children(process.pid), f"{name} to start", seconds=30)
        self.pids[name] = _children(process.pid)[0]
        self._connect(name)
        wait_until(
            lambda: quiet([*self.enter(name), "systemctl", "is-active", "ssh"]).returncode == 0,
            lambda: f"{name}'s systemd: {(self.folder / f'{name}.log').read_text()}",
            seconds=60,
        )

    def _connect(self, name: str) -> None:
        pid = str(self.pids[name])
        link = f"to-{name}"
        inside = ["-n", self.network, "link"]
        ip(*inside, "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        ip(*inside, "set", link, "master", "lan", "up")
        net = ["nsenter", "-t", pid, "-n", "ip"]
        subnet = f"{self.addresses[name]}/24"
        subprocess.run([*net, "addr", "add", subnet, "dev", "eth0"], check=True)
        subprocess.run([*net, "link", "set", "eth0", "up"], check=True)
        subprocess.run([*net, "link", "set", "lo", "up"], check=True)

    def _cgroup(self, name: str) -> str:
        return f"{self.network}-{name}"

    def enter(self, name: str) -> list[str]:
        pid = str(self.pids[name])
        return ["nsenter", "-t", pid, "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]

    def type(
        self, name: str, text: str, seconds: float = 300
    ) -> "subprocess.CompletedProcess[str]":
        """Type a text as the user, in one session of bash a machine: its folder and PATH stay.

        Passwords that sudo and ssh ask for are typed, too.
        """
        session = (
            f"umask 022; set -euo pipefail; cd; if [ -e .session ]; then . ./.session; fi\n{text}\n"
            '{ declare -p PATH; echo "cd $PWD"; } >~/.session'
        )
        environ = {
            "HOME": f"/home/{USER}",
            "USER": USER,
            "LOGNAME": USER,
            "LANG": "C.UTF-8",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "DISPLAY": ":0",
            "SUDO_ASKPASS": "/usr/local/bin/answer",
            "SSH_ASKPASS": "/usr/local/bin/answer",
            "SSH_ASKPASS_REQUIRE": "force",
        }
        user = [
            "setpriv",
            "--bounding-set",
            "-sys_time",
            "--reuid",
            USER,
            "--regid",
            USER,
            "--init-groups",
            "--",
        ]
        words = [f"{key}={value}" for key, value in environ.items()]
        return subprocess.run(
            [*self.enter(name), "env", "-i", *words, *user, "bash", "-c", session],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=seconds,
        )

    def wait_off(self, name: str) -> None:
        """Until a machine has gone down by itself."""
        self._processes[name].wait(timeout=60)
        self._clean(name)

    def _clean(self, name: str) -> None:
        ip("-n", self.network, "link", "del", f"to-{name}", check=False)
        for hierarchy in HIERARCHIES:
            remove_cgroup(CGROUPS / hierarchy / self._cgroup(name))

    def down(self) -> None:
        """Process 1 ends its machine's processes, mounts and network; this removes the rest."""
        for name, process in self._processes.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[name], signal.SIGKILL)
            process.wait(timeout=60)
        for name in self.addresses:
            self._clean(name)
        ip("netns", "del", self.network, check=False)
        for name in (*self.addresses, "packages"):
            quiet(["rm", "-rf", "--one-file-system", str(self.folder / name)])


def _children(pid: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def systemd_machines(
    folder: Path, addresses: Mapping[str, str], cards: Mapping[str, str]
) -> Iterator[SystemdMachines]:
    """Machines that are removed, with all that they ran and mounted, when the block ends."""
    if os.geteuid() != 0:
        pytest.skip("machines with systemd: needs root")
    if not all((CGROUPS / hierarchy / "cgroup.procs").exists() for hierarchy in HIERARCHIES):
        pytest.skip("machines with systemd: needs the cgroup v1 hierarchies")
    running = SystemdMachines(folder, addresses, cards)
    try:
        running.up()
        yield running
    finally:
        running.down()
