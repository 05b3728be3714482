"""What a job tells its ranks, through environment variables.

Every variable of this project is defined here and nowhere else. Standard library only: every rank
imports this.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ddp_slurm.comm import Comm
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.hostlist import HostlistError, compress_tasks_per_node, expand_tasks_per_node

WORLD_SIZE = "DDP_SLURM_WORLD_SIZE"
TASKS_PER_NODE = "DDP_SLURM_TASKS_PER_NODE"
GLOBAL_BATCH_SIZE = "DDP_SLURM_GLOBAL_BATCH_SIZE"
SHARES = "DDP_SLURM_SHARES"
BALANCE = "DDP_SLURM_BALANCE"
COMM = "DDP_SLURM_COMM"
PREDICTED_STEP = "DDP_SLURM_PREDICTED_STEP"
BUCKET_BYTES = "DDP_SLURM_BUCKET_BYTES"
KNOWN_LIMITS = "DDP_SLURM_KNOWN_LIMITS"
MEASURE_FILE = "DDP_SLURM_MEASURE_FILE"
MEASURED_RANKS = "DDP_SLURM_MEASURED_RANKS"
REQUEUE_MARKER = "DDP_SLURM_REQUEUE_MARKER"
TOKEN = "DDP_SLURM_TOKEN"
VERIFY = "DDP_SLURM_VERIFY"
DATA = "DDP_SLURM_DATA"
DATA_TOKEN = "DDP_SLURM_DATA_TOKEN"

MEASURED = "measured"
"""The value of BALANCE with which the ranks measure their speed."""
ADAPTIVE = "adaptive"
"""The same, with shares that follow the speeds while the ranks train."""


class JobEnvError(DdpSlurmError, ValueError):
    """A DDP_SLURM_* variable whose value the job script would not have set."""


class KnownLimits(NamedTuple):
    """The largest micro-batches of a file of speeds. They hold for one model and one precision."""

    model: str
    """The class of the model."""
    precision: str
    """fp32, bf16 or fp16."""
    of_card: dict[str, int]
    """Samples, by the GPU's model."""


class Verify(NamedTuple):
    """What ``ddp-slurm verify`` asks of a script's process."""

    steps: int
    """Optimizer steps whose gradients are kept; the process ends with the last."""
    ranks: int
    """Of the world that is compared with one process."""
    file: str
    """Where rank 0 writes the gradients."""


def _number(name: str, text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise JobEnvError(f"{name}={text!r} is not a whole number >= 1")
    return int(text)


def _token(name: str, text: str) -> str:
    if not re.fullmatch("[0-9a-f]{32,}", text):
        raise JobEnvError(f"{name} is not 32 or more digits of 0-9a-f; its value is secret")
    return text


def _counts(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(expand_tasks_per_node(text))
    except HostlistError as error:
        raise JobEnvError(f"{name}={text!r}: {error}") from None


def _verify(name: str, text: str) -> Verify:
    found = re.fullmatch("([1-9][0-9]{0,8}):([1-9][0-9]{0,8}):(.+)", text)
    if found is None:
        raise JobEnvError(f"{name}={text!r} is not STEPS:RANKS:FILE")
    return Verify(int(found[1]), int(found[2]), found[3])


def _comm(name: str, text: str) -> Comm:
    try:
        return Comm.read(text)
    except ValueError as error:
        raise JobEnvError(f"{name}: {error}") from None


def _seconds(name: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]{1,3})?", text):
        raise JobEnvError(f"{name}={text!r} is not a number of seconds >= 0")
    return float(text)


def _limits(name: str, text: str) -> KnownLimits:
    try:
        model, precision, of_card = json.loads(text)
        return KnownLimits(model, precision, {card: int(most) for card, most in of_card.items()})
    except (ValueError, TypeError, AttributeError):
        raise JobEnvError(
            f'{name}={text!r} is not JSON such as ["ResNet", "bf16", {{"NVIDIA H200": 512}}]'
        ) from None


def _places(name: str, text: str) -> tuple[tuple[str, str], ...]:
    places = [place.split("/") for place in text.split(",")]
    if any(len(place) != 2 or not place[0] for place in places):
        raise JobEnvError(f"{name}={text!r} is not a list such as gamma/titan,beta/v100")
    return tuple((node, gpu_type) for node, gpu_type in places)


def _places_text(places: tuple[tuple[str, str], ...]) -> str:
    return ",".join("/".join(place) for place in places)


def _verify_text(verify: Verify) -> str:
    return ":".join(map(str, verify))


def _text(name: str, text: str) -> str:
    return text


def _variable(
    name: str, read: Callable[[str, str], Any] = _text, write: Callable[[Any], str] = str
) -> dict[str, Any]:
    """A field's variable.

    Args:
        read: the field's value from the variable's name and text.
        write: the text of a value.
    """
    return {"variable": name, "read": read, "write": write}


@dataclass(frozen=True)
class JobEnv:
    """The plan of a job, as its ranks see it. A field is None where the variable is not set."""

    world_size: int | None = field(default=None, metadata=_variable(WORLD_SIZE, _number))
    """DDP_SLURM_WORLD_SIZE: ranks of the whole job. Every rank checks its world against it."""
    tasks_per_node: tuple[int, ...] | None = field(
        default=None, metadata=_variable(TASKS_PER_NODE, _counts, compress_tasks_per_node)
    )
    """DDP_SLURM_TASKS_PER_NODE: ranks on each node, in the order of node ranks, as ``1,2(x3)``."""
    global_batch_size: int | None = field(
        default=None, metadata=_variable(GLOBAL_BATCH_SIZE, _number)
    )
    """DDP_SLURM_GLOBAL_BATCH_SIZE: samples of one optimizer step over all ranks."""
    shares: tuple[int, ...] | None = field(
        default=None, metadata=_variable(SHARES, _counts, compress_tasks_per_node)
    )
    """DDP_SLURM_SHARES: samples of the global batch for each rank, as ``54(x3),18,5``."""
    balance: str | None = field(default=None, metadata=_variable(BALANCE))
    """DDP_SLURM_BALANCE: ``equal``, ``planned`` (by a file of speeds), or ``measured``: the ranks
    measure their speed at the start and choose the shares themselves; ``adaptive``: and change
    them while they train."""
    comm: Comm | None = field(default=None, metadata=_variable(COMM, _comm))
    """DDP_SLURM_COMM: how the ranks exchange gradients, as ``--comm`` has it; None: exactly."""
    predicted_step: float | None = field(default=None, metadata=_variable(PREDICTED_STEP, _seconds))
    """DDP_SLURM_PREDICTED_STEP: seconds that an optimizer step takes by the file of speeds."""
    bucket_bytes: int | None = field(default=None, metadata=_variable(BUCKET_BYTES, _number))
    """DDP_SLURM_BUCKET_BYTES: of each all-reduce of gradients, as it fits the links in the file of
    speeds; None: DistributedDataParallel's own."""
    known_limits: KnownLimits | None = field(
        default=None, metadata=_variable(KNOWN_LIMITS, _limits, json.dumps)
    )
    """DDP_SLURM_KNOWN_LIMITS: the most samples that each card runs at once, by the file of speeds,
    as JSON: ``["ResNet", "bf16", {"NVIDIA H200": 512}]``."""
    measure_file: str | None = field(default=None, metadata=_variable(MEASURE_FILE))
    """DDP_SLURM_MEASURE_FILE: the path at which rank 0 writes a file of speeds; the training ends
    where it would have chosen its shares. Set by ``ddp-slurm measure``."""
    measured_ranks: tuple[tuple[str, str], ...] | None = field(
        default=None, metadata=_variable(MEASURED_RANKS, _places, _places_text)
    )
    """DDP_SLURM_MEASURED_RANKS: node and GPU type of each rank as the cluster's file names them, as
    ``gamma/titan,beta/v100``; the type is empty where it names none."""
    requeue_marker: str | None = field(default=None, metadata=_variable(REQUEUE_MARKER))
    """DDP_SLURM_REQUEUE_MARKER: path of the file that rank 0 creates after it stopped before the
    time limit with a good snapshot, or while its data set was fetched: the job script then requeues
    the job. A file that is not empty means the latter."""
    token: str | None = field(default=None, repr=False, metadata=_variable(TOKEN, _token))
    """DDP_SLURM_TOKEN: 32 or more random hexadecimal digits, by which the ranks of a job recognise
    each other when they meet. Made at the job's start, and kept in the environment alone."""
    verify: Verify | None = field(default=None, metadata=_variable(VERIFY, _verify, _verify_text))
    """DDP_SLURM_VERIFY: ``STEPS:RANKS:FILE``, of ``ddp-slurm verify`` alone."""
    data: str | None = field(default=None, metadata=_variable(DATA))
    """DDP_SLURM_DATA: the folder on this node that holds the job's data set (``--dataset``), in
    full, when the command begins."""
    data_token: str | None = field(default=None, repr=False, metadata=_variable(DATA_TOKEN, _token))
    """DDP_SLURM_DATA_TOKEN: the token of ``ddp-slurm data serve``, where it is not in a file."""

    def to_environ(self) -> dict[str, str]:
        """The variables of all fields that are not None."""
        environ = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None:
                environ[one.metadata["variable"]] = one.metadata["write"](value)
        return environ

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "JobEnv":
        """Read ``environ`` (default ``os.environ``); an empty variable counts as not set.

        Raises JobEnvError with the variable and its value.
        """
        env = os.environ if environ is None else environ
        values = {}
        for one in fields(cls):
            name = one.metadata["variable"]
            if env.get(name):
                values[one.name] = one.metadata["read"](name, env[name])
        return cls(**values)


def new_token() -> str:
    """A token that nobody can guess: 128 random bits."""
    return os.urandom(16).hex()
