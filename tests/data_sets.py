"""A data set for tests, and the process that serves it."""

import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.waiting import wait_until

TOKEN = "0123456789abcdef" * 2
WRONG_TOKEN = "f" * 32


def make_data_set(folder: Path, *, kilobytes: int = 3000) -> dict[str, bytes]:
    """Files of several sizes; returns their contents by path."""
    source = random.Random(0)
    files = {
        "train/large.bin": source.randbytes(kilobytes * 1024 + 13),
        "train/a b#c%é.txt": b"text",
        "empty": b"",
        "page.html": b"<script>1</script>",
        **{f"small/{number}": source.randbytes(1000) for number in range(40)},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return files


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without those whose names begin with a dot."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


class DataServer:
    """``ddp-slurm data serve`` as a process; can be killed and started again. Closed, it ends."""

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        with socket.socket() as probe:
            probe.bind((address, 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.address = address
        self.url = f"http://{address}:{self.port}"
        self.start()

    def start(self) -> None:
        command = ["data", "serve", str(self.folder), "--bind", f"{self.address}:{self.port}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddp_slurm.cli", *command],
            env={**os.environ, "DDP_SLURM_DATA_TOKEN": TOKEN},
        )
        wait_until(self._listens, "data serve", seconds=60)

    def _listens(self) -> bool:
        assert self.process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex((self.address, self.port)) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "DataServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def request(
        self, path: str, token: str | None = TOKEN, **headers: str
    ) -> urllib.request.Request:
        request = urllib.request.Request(f"{self.url}{path}", headers=headers)
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        return request
