"""Machines without Slurm for the tests: network namespaces with a name, an address and an sshd."""

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_slurm.lab import network
from ddp_slurm.lab.enter import enter
from ddp_slurm.lab.lab import all_labs
from ddp_slurm.lab.registry import locked

from .engine import Engine, make_root, need, start_engine

_numbers = itertools.count(1)
START_SECONDS = 20.0

# sshd wants /run/sshd; a /run of its own leaves nothing behind on the machine.
SSHD = "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && exec /usr/sbin/sshd -D -e -f "

SSHD_CONFIG = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UseDNS no
AcceptEnv NOTHING
SetEnv HOME={folder} DOCKER_HOST=unix://{folder}/{name}.engine/sock
"""

SSH_CONFIG = """\
Host *
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class Hosts:
    """Running machines, reached from this one by the real ssh client."""

    folder: Path
    switch: str
    addresses: dict[str, str]
    environ: dict[str, str]
    """For programs that use ssh: the client trusts these machines' keys and no others."""

    def netns(self, name: str) -> str:
        return f"{self.switch}.{name}"

    def engine(self, name: str) -> Path:
        """The folder of a container engine that programs on the machine find."""
        return self.folder / f"{name}.engine"

    def cluster_yaml(self, gpus: dict[str, int], extra: str = "") -> Path:
        """A cluster.yaml of some of the machines, in the order given."""
        file = self.folder / f"cluster{next(_numbers)}.yaml"
        nodes = ""
        for name, count in gpus.items():
            address = self.addresses[name]
            nodes += f"  - {{name: {name}, address: {address}, gpus: {count}, interface: eth0}}\n"
        ssh = f"ssh: {{identity: {self.folder}/user_key}}"
        file.write_text(f"name: boxes\n{ssh}\nnodes:\n{nodes}{extra}")
        return file

    def inside(self, name: str, argv: Sequence[str]) -> list[str]:
        return enter(argv, etc=self.folder / "etc", netns=self.netns(name), host=name)

    def processes(self, name: str) -> list[str]:
        """Command lines of all that runs on a machine besides sshd."""
        lines = []
        for pid in network.processes(self.netns(name)):
            try:
                line = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
            except OSError:
                continue
            if line and not line.startswith(("sshd", "/usr/sbin/sshd")):
                lines.append(line)
        return lines

    def kill(self, name: str) -> None:
        """The machine dies as if unplugged."""
        index = int(self.addresses[name].rpartition(".")[2])
        network.plug(self.switch, index, up=False)
        network.kill_processes(self.netns(name))


@pytest.fixture(scope="session")
def debian_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root of another system, for images. The tests that use it start container engines."""
    if not os.environ.get("DDP_SLURM_TEST_CONTAINERS"):
        pytest.skip("starts a container engine: make test-containers")
    need("debootstrap")
    root = tmp_path_factory.mktemp("debian") / "root"
    make_root(root)
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def engine(debian_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    need("dockerd", "docker")
    with start_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """``make_hosts("gamma", "beta")``: these machines, gone at the end of the test."""
    if os.geteuid() != 0 or not all(
        shutil.which(p, path="/usr/sbin:/usr/bin:/sbin:/bin") for p in ("ip", "sshd", "ssh")
    ):
        pytest.skip("machines in network namespaces need root, iproute2 and openssh-server")
    switches: list[str] = []
    links: list[int] = []

    def make(*names: str) -> Hosts:
        switch = f"ddphosts{os.getpid()}-{next(_numbers)}"
        with locked():  # another test process looks for a free network, too
            number = network.free_network(lab.network for lab in all_labs())
            links.append(number)
            switches.append(switch)
            network.make_switch(switch, number)
        return _start(tmp_path / f"hosts{number}", switch, network.NETWORKS[number], names)

    yield make
    for switch in switches:
        for netns in network.namespaces(switch):
            network.remove_namespace(netns)
    for link in links:
        network.remove_link(link)


def _start(folder: Path, switch: str, prefix: str, names: Sequence[str]) -> Hosts:
    addresses = {name: f"{prefix}.{index}" for index, name in enumerate(names, start=1)}
    (folder / "etc" / "root").mkdir(parents=True)
    (folder / "etc" / "nsswitch.conf").write_text(
        "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
    )
    hosts_lines = [
        "127.0.0.1 localhost",
        *(f"{address} {name}" for name, address in addresses.items()),
    ]
    (folder / "etc" / "hosts").write_text("\n".join(hosts_lines) + "\n")
    for key in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True
        )
    public = (folder / "host_key.pub").read_text().split()
    (folder / "known_hosts").write_text(
        "".join(f"{address} {public[0]} {public[1]}\n" for address in addresses.values())
    )
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
    (folder / "bin").mkdir()
    client = folder / "bin" / "ssh"
    client.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
    client.chmod(0o755)
    hosts = Hosts(
        folder, switch, addresses, {**os.environ, "PATH": f"{client.parent}:{os.environ['PATH']}"}
    )
    for name, address in addresses.items():
        network.make_node(hosts.netns(name), switch, int(address.rpartition(".")[2]), address)
        config = folder / f"sshd_config.{name}"
        config.write_text(SSHD_CONFIG.format(folder=folder, address=address, name=name))
        log = (folder / f"sshd.{name}.log").open("w")
        subprocess.Popen(  # ended with its namespace
            hosts.inside(name, ["sh", "-euc", SSHD + str(config)]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    for name, address in addresses.items():
        _wait_for_sshd(address, folder / f"sshd.{name}.log")
    return hosts


def _wait_for_sshd(address: str, log: Path) -> None:
    give_up = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((address, 22), timeout=1).close()
        except OSError:
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        else:
            return
