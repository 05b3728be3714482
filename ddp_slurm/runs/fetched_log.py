"""A log that grows on the host of rank 0 and that this host does not see: no shared folder."""

import base64
import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ddp_slurm.ask import ask
from ddp_slurm.hostlist import expand_hostlist
from ddp_slurm.runs.log import GrowingLog
from ddp_slurm.slurm_client.states import JobState

FETCH_SECONDS = 2.0
SSH_SECONDS = 60.0


def host_elsewhere(state: JobState) -> str | None:
    """The host on which the job script of a Slurm job runs or ran; None for this one."""
    first = state.components[0].nodes if state.components else ""
    hosts = list(expand_hostlist(first)) if first else []
    is_here = not hosts or hosts[0].split(".")[0] == socket.gethostname().split(".")[0]
    return None if is_here else hosts[0]


class FetchedLog(GrowingLog):
    """The file here where it exists, else what its host has more, over ssh."""

    def __init__(self, path: Path, host: str) -> None:
        super().__init__(path)
        self.problem = ""
        """Why nothing could be fetched the last time, empty where all is well."""
        self._host = host
        self._is_fetched = False
        # a shared folder may show the file a moment later
        self._next_fetch = time.monotonic() + FETCH_SECONDS

    def fetch_now(self) -> None:
        """The next look does not wait: for a log that ends."""
        self._next_fetch = 0.0

    def _new_chunks(self) -> Iterator[bytes]:
        if not self._is_fetched and self.path.exists():
            self.problem = ""
            yield from super()._new_chunks()
        elif time.monotonic() >= self._next_fetch:
            chunk = self._fetch()
            self._next_fetch = time.monotonic() + FETCH_SECONDS
            self._is_fetched = self._is_fetched or bool(chunk)
            self._offset += len(chunk)
            yield chunk

    def _fetch(self) -> bytes:
        # imported here: most logs are files of this host
        from ddp_slurm.cluster import Node
        from ddp_slurm.ssh.command import ssh_argv

        # base64: a cut character must not change the count of bytes
        command = f"tail -c +{self._offset + 1} {shlex.quote(str(self.path))} | base64 -w0"
        answer = ask(ssh_argv(Node(self._host), command), timeout_seconds=SSH_SECONDS)
        self.problem = answer.err.strip()
        return base64.b64decode(answer.out) if answer.status == 0 else b""
