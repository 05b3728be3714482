"""What others do to a job whose rank 0 they can reach, and the ranks that they do it to."""

import contextlib
import encodings.idna  # noqa: F401  # another user may not read the folder that it is in
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ddp_slurm.rank_env import LaunchError
from ddp_slurm.training import init_distributed

from .worlds import server, tell

NOBODY = 65534
KINDS = ("close", "garbage", "half a request", "silence", "half a greeting")


def as_a_stranger(function: Callable[..., None], *args: Any) -> None:
    """Run the function as another user, and wait for it."""
    process = server.Process(target=_become_nobody, args=(function, args))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def _become_nobody(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    function(*args)


def set_keys(port: int, values: dict[str, str]) -> None:
    """Set keys of rank 0's store, if it lets this process."""
    with contextlib.suppress(RuntimeError):
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            timeout=timedelta(seconds=2),
            wait_for_workers=False,
        )
        for key, value in values.items():
            PrefixStore("ddp_slurm//0", store).set(key, value)


def report_of_success(ranks: int) -> dict[str, str]:
    """The keys with which all ranks end, with the exit status 0."""
    message = json.dumps(["end", 0, "all done"])
    keys = {f"message/{rank}/1": message for rank in range(ranks)}
    return {**keys, "first failure": json.dumps([0, "all done"])}


class RunsCode:
    """A pickled object that creates a file where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def be_or_meet_an_impostor(pipe: Connection, file: str) -> str:
    """Rank 0 is a stranger who sends a pickled object; the others are the job's ranks."""
    if os.environ["RANK"] == "0":
        from ddp_slurm.training.process_group import joining

        def send_object(meeting: Any, control: dist.ProcessGroup) -> None:
            dist.broadcast_object_list([RunsCode(file)], src=0, group=control)
            raise LaunchError("sent")

        joining._share_facts = send_object  # type: ignore[assignment]
    try:
        init_distributed(rendezvous_seconds=3.0)
    except (LaunchError, ValueError) as error:
        time.sleep(1)
        return str(error)
    return "met"


def connect_often(port: int, count: int) -> None:
    """So many connections of all kinds; those that are silent stay open to the end."""
    open_ones = []
    for number in range(count):
        try:
            one = socket.create_connection(("127.0.0.1", port), 10)
            _send(one, KINDS[number % len(KINDS)])
        except OSError:  # closed by the other end already
            continue
        if KINDS[number % len(KINDS)] in ("close", "garbage"):
            one.close()
        else:
            open_ones.append(one)
    time.sleep(0.5)


def _send(one: socket.socket, kind: str) -> None:
    texts = {
        "garbage": os.urandom(200),
        "half a request": b"GET / HTTP/1.1\r\nHost: ",
        "half a greeting": b"ddp_slurm rend",
    }
    one.sendall(texts.get(kind, b""))


def train_until_told(pipe: Connection) -> int:
    """The number of steps that were taken until rank 0 was sent a message."""
    with init_distributed(rendezvous_seconds=60.0) as world:
        tell(pipe, "met")
        steps = 0
        stop = torch.zeros(1)
        while not stop:
            stop.fill_(float(world.rank == 0 and pipe.poll(0.01)))
            dist.all_reduce(stop)
            steps += 1
        return steps


def start_when_told(pipe: Connection) -> int:
    """Rank 1 comes late."""
    if os.environ["RANK"] == "1":
        pipe.recv_bytes()
    return train_until_told(pipe)
