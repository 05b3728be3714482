"""What a job left on the host of rank 0 and this host cannot see, without a shared folder."""

import base64
import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ddp_slurm.ask import Answer, ask
from ddp_slurm.hostlist import expand_hostlist
from ddp_slurm.runs.log import GrowingLog
from ddp_slurm.runs.run_folder import EXIT_MARKER, Run
from ddp_slurm.slurm_client.states import JobState

FETCH_SECONDS = 2.0
SSH_SECONDS = 60.0


NO_FOLDER = "no-folder"
"""What the other host prints where it lacks the folder of the log."""


def host_elsewhere(state: JobState, run: Run | None) -> str | None:
    """The host on which the job script of a Slurm job runs or ran.

    By the plan, where Slurm no longer knows it. None for this host, and for a job that waits.
    """
    nodes = state.components[0].nodes if state.components else ""
    if not nodes and run is not None and not state.is_waiting:
        nodes = run.plan["ranks"][0]["node"]
    hosts = list(expand_hostlist(nodes)) if nodes else []
    is_here = not hosts or hosts[0].split(".")[0] == socket.gethostname().split(".")[0]
    return None if is_here else hosts[0]


def exit_marker_elsewhere(run: Run, host: str) -> str:
    """The text of the exit marker on the host of the job script, empty where there is none."""
    path = shlex.quote(str(run.folder / EXIT_MARKER))
    return _ask_host(host, f"cat {path}").out


def _ask_host(host: str, command: str) -> Answer:
    # imported here: most logs are files of this host
    from ddp_slurm.cluster import Node
    from ddp_slurm.ssh.command import ssh_argv

    return ask(ssh_argv(Node(host), command), timeout_seconds=SSH_SECONDS)


class FetchedLog(GrowingLog):
    """The file here where it exists, else over ssh what its host has beyond what was read."""

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
        path, folder = (shlex.quote(str(path)) for path in (self.path, self.path.parent))
        # base64: a cut character must not change the count of bytes
        read = f"tail -c +{self._offset + 1} {path} | base64 -w0"
        command = f"if [ -d {folder} ]; then {read}; else echo {NO_FOLDER}; fi"
        answer = _ask_host(self._host, command)
        self.problem = answer.err.strip()
        if answer.out.strip() == NO_FOLDER:
            self.problem = (
                f"{self._host} does not have the folder {self.path.parent}, so Slurm could not "
                "write the log there; without a shared folder every node needs code and data "
                "under the same path"
            )
            return b""
        return base64.b64decode(answer.out) if answer.status == 0 else b""
