"""How long uneven labs wait for a data set, and what the server sends. Needs root.

    python -m benchmarks.data                        # 7 nodes, 1 GB, 100 Mbit/s: some 5 minutes
    python -m benchmarks.data --megabytes 200        # shorter

Nodes are network namespaces with limited links (tc tbf). Each starts with an empty cache. The
server's uplink is what its interface has sent, headers and the nodes' reports included.
"""

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.links_network import Machines
from ddp_slurm.console import table
from ddp_slurm.job_env import DATA_TOKEN, TASKS_PER_NODE, TOKEN

PORT = 8400

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--nodes", type=int, default=7)
parser.add_argument("--megabytes", type=int, default=1000)
parser.add_argument("--rate", default="100mbit", help="of each link, in each direction")
parser.add_argument("--folder", type=Path, help="for the copies; default a temporary one")
parser.add_argument("--limit", type=float, default=600.0, help="seconds for one figure")


class Figure(NamedTuple):
    seconds: float
    sent: int
    """Bytes that the server's interface sent."""


class Lab:
    """A server and nodes that can reach each other by limited links."""

    def __init__(self, machines: Machines, folder: Path, limit: float) -> None:
        self.machines = machines
        self.folder = folder
        self.limit = limit
        self.environ = {**os.environ, DATA_TOKEN: secrets.token_hex(16)}

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[bytes]]:
        address = f"{self.machines.address(0)}:{PORT}"
        words = ["ddp_slurm.cli", "data", "serve", str(self.folder / "set"), "--bind", address]
        server = self._start(0, words, self.environ)
        time.sleep(3)
        try:
            yield server
        finally:
            server.kill()
            server.wait()

    def fetch(self, count: int, *, kill_after: float | None = None) -> Figure:
        """All of ``count`` nodes fetch the data set into new caches."""
        shutil.rmtree(self.folder / "caches", ignore_errors=True)
        token = secrets.token_hex(16)
        with self.serving() as server:
            sent = self._sent()
            started = time.monotonic()
            nodes = [self._start_node(node, count, token) for node in range(count)]
            try:
                if kill_after is None:
                    self._wait(nodes, started)
                else:
                    time.sleep(kill_after)
                    server.kill()
                    server.wait()
                    time.sleep(5)
                    with self.serving():
                        self._wait(nodes, started)
            finally:
                for node in nodes:
                    node.kill()
            return Figure(time.monotonic() - started, self._sent() - sent)

    def _wait(self, nodes: list[subprocess.Popen[bytes]], started: float) -> None:
        for node in nodes:
            status = node.wait(self.limit - (time.monotonic() - started))
            if status:
                raise SystemExit(f"a node ended with status {status}")

    def _start_node(self, node: int, count: int, token: str) -> subprocess.Popen[bytes]:
        url = f"http://{self.machines.address(0)}:{PORT}"
        cache = str(self.folder / "caches" / str(node))
        place = {"RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": 1}
        place |= {"GROUP_RANK": node, "MASTER_PORT": 29500}
        environ = {name: str(value) for name, value in place.items()}
        environ |= {"MASTER_ADDR": "none", TOKEN: token, TASKS_PER_NODE: f"1(x{count})"}
        words = ["ddp_slurm.data.node", url, "--cache", cache, "--", "true"]
        return self._start(node + 1, words, {**self.environ, **environ})

    def _start(
        self, machine: int, words: list[str], environ: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", self.machines.names[machine]]
        command += [sys.executable, "-m", *words]
        return subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)

    def _sent(self) -> int:
        file = "/sys/class/net/eth0/statistics/tx_bytes"
        command = ["ip", "netns", "exec", self.machines.names[0], "cat", file]
        return int(subprocess.check_output(command))


def make_set(folder: Path, megabytes: int) -> int:
    """A tenth of the bytes in small files. Returns the bytes."""
    (folder / "small").mkdir(parents=True)
    block = os.urandom(1_000_000)
    for number in range(megabytes):
        # no two pieces alike
        content = number.to_bytes(8, "big") + block[8:]
        if number < megabytes // 10:
            for part in range(10):
                data = content[part * 100_000 : (part + 1) * 100_000]
                (folder / "small" / f"{number}-{part}").write_bytes(data)
        else:
            with (folder / "large").open("ab") as file:
                file.write(content)
    return megabytes * 1_000_000


def main() -> None:
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="ddp-slurm-data-", dir=arguments.folder) as name,
        Machines(arguments.nodes + 1) as machines,
    ):
        folder = Path(name)
        size = make_set(folder / "set", arguments.megabytes)
        machines.limit(arguments.rate)
        lab = Lab(machines, folder, arguments.limit)
        one = lab.fetch(1)
        figures = {
            "1 node": one,
            f"{arguments.nodes} nodes": lab.fetch(arguments.nodes),
            f"{arguments.nodes} nodes, server killed": lab.fetch(
                arguments.nodes, kill_after=one.seconds / 2
            ),
        }
        rows: list[tuple[str, ...]] = [("", "all ready after", "of one node's", "sent / data")]
        for title, (seconds, sent) in figures.items():
            ratio, part = seconds / one.seconds, sent / size
            rows.append((title, f"{seconds:.1f} s", f"{ratio:.2f}", f"{part:.2f}"))
        print(table(rows))


if __name__ == "__main__":
    main()
