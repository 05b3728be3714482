"""The link between two hosts is cut while ranks meet, work or leave: both ends name the other and
end."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .joining import lose_the_link
from .worlds import PATIENCE_SECONDS, tell, world

ADDRESSES = ["10.211.0.1", "10.211.0.2"]


class Link:
    """Two network namespaces that reach each other through a third one with a bridge."""

    def __init__(self) -> None:
        mark = f"ddp{os.getpid()}"
        self.ends = [f"{mark}a", f"{mark}b"]
        self.middle = f"{mark}m"

    def build(self) -> None:
        for name in (*self.ends, self.middle):
            ip("netns", "add", name)
        ip("-n", self.middle, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.middle, "link", "set", "bridge", "up")
        for number, (end, address) in enumerate(zip(self.ends, ADDRESSES, strict=True)):
            port = f"port{number}"
            veth = ["type", "veth", "peer", "name", port, "netns", self.middle]
            ip("-n", end, "link", "add", "eth0", *veth)
            ip("-n", end, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", end, "link", "set", device, "up")
            ip("-n", self.middle, "link", "set", port, "master", "bridge", "up")

    def cut(self) -> None:
        ip("-n", self.middle, "link", "set", "bridge", "down")

    def remove(self) -> None:
        for name in (*self.ends, self.middle):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def link() -> Iterator[Link]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made = Link()
    try:
        made.build()
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot make network namespaces: {error.stderr.decode()}")
    finally:
        made.remove()


@pytest.mark.parametrize("moment", ["meeting", "collective", "leaving"])
def test_cut_link_ends_both_sides(tmp_path: Path, link: Link, moment: str) -> None:
    environ = {
        "MASTER_ADDR": ADDRESSES[0],
        "GLOO_SOCKET_IFNAME": "eth0",
        "SLURMD_NODENAME": "node",
    }
    with world(tmp_path, (1, 1), lose_the_link, link.ends, moment, environ=environ) as running:
        assert running.receive(0) == "ready"
        link.cut()
        for pipe in running.pipes:
            tell(pipe, "go")
        statuses = running.wait(PATIENCE_SECONDS)
        logs = [running.log(rank).splitlines() for rank in (0, 1)]
    assert None not in statuses, logs
    assert 0 not in statuses, logs
    assert "rank 1 on node: " in logs[1][-1]
    assert "rank 0 " in logs[1][-1]
    assert "does not respond" in logs[1][-1]
    if moment != "meeting":
        assert "rank 1 on node ended without a report or does not respond" in logs[0][-1]
