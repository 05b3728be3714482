"""Network namespaces that stand for machines: each with one limited link to a common switch.

Their names exist in a mount namespace of this process alone, so that the kernel removes all of it
with the last process, however that ends.
"""

import ctypes
import os
import subprocess
from pathlib import Path

from ddp_slurm.parent import die_with_parent

NETWORK = "10.212.0"
PORT = 29500
NAMES = Path("/run/netns")
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str) -> None:
    """Move this process, forked by the one that has the Machines, into one of them.

    It is killed when that process ends.
    """
    die_with_parent()
    with (NAMES / namespace).open() as file:
        if LIBC.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


class Machines:
    """A namespace for each machine, and one for the switch between them. A context manager.

    Args:
        count: of machines.
        tools: a folder in which iproute2 is unpacked (``dpkg -x``), where the system has none.
    """

    def __init__(self, count: int, tools: Path | None = None) -> None:
        mark = f"lnk{os.getpid()}"
        self.names = [f"{mark}m{machine}" for machine in range(count)]
        self.switch = f"{mark}s"
        self._environ = dict(os.environ)
        if tools is not None:
            folders = [tools / part for part in ("usr/sbin", "sbin", "usr/bin", "bin")]
            libraries = [tools / part / "x86_64-linux-gnu" for part in ("usr/lib", "lib")]
            self._prepend("PATH", folders)
            self._prepend("LD_LIBRARY_PATH", libraries)

    def address(self, machine: int) -> str:
        return f"{NETWORK}.{machine + 1}"

    def limit(self, rate: str) -> None:
        """``1gbit``, for example, in each direction of every machine's link; or ``unlimited``."""
        for machine, name in enumerate(self.names):
            for namespace, device in ((name, "eth0"), (self.switch, f"port{machine}")):
                where = ["-n", namespace, "qdisc"]
                self._run("tc", *where, "delete", "dev", device, "root", check=False)
                if rate != "unlimited":
                    shape = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
                    self._run("tc", *where, "add", "dev", device, "root", *shape)

    def __enter__(self) -> "Machines":
        self._hide_names()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _hide_names(self) -> None:
        """From all other processes, as ``unshare --mount`` does it."""
        if LIBC.unshare(CLONE_NEWNS):
            raise SystemExit(f"network namespaces need root: {os.strerror(ctypes.get_errno())}")
        NAMES.mkdir(parents=True, exist_ok=True)
        self._run("mount", "--make-rprivate", "/")
        self._run("mount", "-t", "tmpfs", "tmpfs", str(NAMES))

    def _build(self) -> None:
        for name in (*self.names, self.switch):
            self._run("ip", "netns", "add", name)
        self._run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        self._run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for machine, name in enumerate(self.names):
            port = f"port{machine}"
            pair = ["type", "veth", "peer", "name", port, "netns", self.switch]
            self._run("ip", "-n", name, "link", "add", "eth0", *pair)
            address = f"{self.address(machine)}/24"
            self._run("ip", "-n", name, "address", "add", address, "dev", "eth0")
            for device in ("lo", "eth0"):
                self._run("ip", "-n", name, "link", "set", device, "up")
            up = ["master", "bridge", "up"]
            self._run("ip", "-n", self.switch, "link", "set", port, *up)

    def _remove(self) -> None:
        for name in (*self.names, self.switch):
            self._run("ip", "netns", "delete", name, check=False)

    def _run(self, *command: str, check: bool = True) -> None:
        done = subprocess.run(
            command, env=self._environ, capture_output=True, text=True, timeout=20
        )
        if check and done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")

    def _prepend(self, name: str, folders: list[Path]) -> None:
        parts = [str(folder) for folder in folders] + [self._environ.get(name, "")]
        self._environ[name] = ":".join(part for part in parts if part)
