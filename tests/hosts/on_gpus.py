"""Two or more "hosts" on one machine with GPUs, for torchrun and NCCL between them.

python tests/hosts/on_gpus.py 1 2 -- python train.py 5 1    # a host with one GPU, one with two

Needs root and iproute2, no sshd. Each host is a network namespace with its own name and address. A
replacement of ssh enters it; everything else is what users run.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from ddp_slurm.lab import network
from ddp_slurm.lab.enter import enter
from ddp_slurm.lab.lab import all_labs

NAMES = ("alpha", "beta", "gamma", "delta")


def main(arguments: list[str]) -> int:
    split = arguments.index("--")
    gpus, command = [int(text) for text in arguments[:split]], arguments[split + 1 :]
    number, switch = (
        network.free_network(lab.network for lab in all_labs()),
        f"ddpgpus{os.getpid()}",
    )
    with tempfile.TemporaryDirectory() as folder:
        network.make_switch(switch, number)
        try:
            environ = prepare(Path(folder), switch, network.NETWORKS[number], gpus)
            submit = [
                "-m",
                "ddp_slurm.submit",
                "--backend",
                "torchrun",
                "--cluster",
                f"{folder}/cluster.yaml",
            ]
            words = [
                "--env",
                "NCCL_DEBUG=INFO",
                "--env",
                f"TMPDIR={folder}",
                "--setup",
                f". {folder}/gpus",
                "--",
                *command,
            ]
            return subprocess.run([sys.executable, *submit, *words], env=environ).returncode
        finally:
            for netns in network.namespaces(switch):
                network.remove_namespace(netns)
            network.remove_link(number)


def prepare(folder: Path, switch: str, prefix: str, gpus: list[int]) -> dict[str, str]:
    """Create the hosts, cluster.yaml and the ssh; returns the environment that finds it."""
    addresses = {
        name: f"{prefix}.{index}" for index, name in enumerate(NAMES[: len(gpus)], start=1)
    }
    (folder / "etc" / "root").mkdir(parents=True)
    (folder / "etc" / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "etc" / "hosts").write_text("\n".join(lines) + "\n")
    nodes, cases, devices = [], [], []
    first = 0
    for (name, address), count in zip(addresses.items(), gpus, strict=True):
        network.make_node(f"{switch}.{name}", switch, int(address.rpartition(".")[2]), address)
        nodes.append(f"  - {{name: {name}, address: {address}, interface: eth0, gpus: {count}}}\n")
        inside = enter(["sh", "-c"], etc=folder / "etc", netns=f"{switch}.{name}", host=name)
        cases.append(f'{address}) exec {shlex.join(inside)} "$3" ;;\n')
        visible = ",".join(map(str, range(first, first + count)))
        devices.append(f"{name}) export CUDA_VISIBLE_DEVICES={visible} ;;\n")
        first += count
    (folder / "cluster.yaml").write_text("name: cards\nnodes:\n" + "".join(nodes))
    (folder / "gpus").write_text(f"case $(hostname) in\n{''.join(devices)}esac\n")
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\ncase $2 in\n{"".join(cases)}esac\n'
    )
    ssh.chmod(0o755)
    return {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
