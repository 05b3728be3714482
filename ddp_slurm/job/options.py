"""What is asked of a job: the keys of job.yaml, which are also the options of ``submit`` and ``plan``."""

import os
import re
import shlex
from dataclasses import dataclass
from typing import Any

from ddp_slurm.errors import DdpSlurmError, did_you_mean
from ddp_slurm.hostlist import expand_hostlist
from ddp_slurm.job.containers import Container, Mount
from ddp_slurm.schema import fields
from ddp_slurm.schema.schema import Reader, Schema, key, tuple_of


class OptionsError(DdpSlurmError):
    """An option of the job cannot be used."""


SBATCH_KEYS_OF_THE_PLAN = {
    "array": "Slurm refuses arrays of heterogeneous jobs; submit the jobs one by one",
    "gres": "the plan sets it for each component, from the nodes' gpus",
    "gpus": "use --gpus N for a part of the cluster",
    "gpus-per-node": "the plan sets gres for each component",
    "gpus-per-task": "it would hide the other GPUs of the node from each rank; the plan sets gres",
    "ntasks": "the plan sets it for each component",
    "ntasks-per-node": "the plan sets it for each component",
    "nodes": "use --nodes LIST for a part of the cluster",
    "nodelist": "use --nodes LIST for a part of the cluster",
    "hetjob": "the plan makes the components",
    "wrap": "put the command after --",
    "distribution": "the shares are planned for ranks in the order of the nodes",
    "ntasks-per-gpu": "the plan sets the tasks of each component",
    "nodefile": "use --nodes LIST for a part of the cluster",
    "chdir": "submit in that folder: the ranks start there, and the log and what is kept of the job are found there",
    "clusters": "status, logs and cancel ask this cluster; submit on a login node of the other one",
    "test-only": "nothing would be submitted; write the script with --script FILE, then: sbatch --test-only FILE",
    "wait": "use --follow",
    "error": "both streams of all ranks go to the log of --output, where status and logs look for them",
    "export": "the ranks would not get the script's variables; use --env for yours",
    **{
        key: f"use --{option}"
        for key, option in {
            "job-name": "name",
            "time": "time",
            "output": "output",
            "partition": "partition",
            "account": "account",
            "qos": "qos",
            "cpus-per-task": "cpus-per-task",
            "mem": "memory",
            "mem-per-cpu": "memory",
            "mem-per-gpu": "memory",
            "signal": "signal-seconds",
            "requeue": "max-restarts",
            "no-requeue": "max-restarts",
        }.items()
    },
}


@dataclass(frozen=True)
class SbatchOption:
    """Any other sbatch option, for all components or for one."""

    component: int | None
    key: str
    value: str | None

    @classmethod
    def read(cls, text: Any) -> "SbatchOption":
        """Raises ValueError."""
        if isinstance(text, cls):
            return text
        match = re.fullmatch(
            r"(?:([0-9]{1,3}):)?(?:--)?([a-z][a-z0-9-]*)(?:=(.*))?", fields.plain_text(text)
        )
        if not match:
            raise ValueError(
                f"{text!r} is not KEY=VALUE or COMPONENT:KEY=VALUE, such as 'reservation=lab' or '1:mincpus=4'"
            )
        component, key, value = match.groups()
        if key in SBATCH_KEYS_OF_THE_PLAN:
            raise ValueError(f"{key!r} cannot be set here: {SBATCH_KEYS_OF_THE_PLAN[key]}")
        return cls(component=None if component is None else int(component), key=key, value=value)


def _env(value: Any) -> dict[str, str]:
    """A mapping, or ``["NAME=VALUE", ...]`` of the command line."""
    if isinstance(value, list):
        pairs = {}
        for item in value:
            name, equals, text = fields.one_line(item).partition("=")
            if not equals:
                raise ValueError(f"{item!r} is not NAME=VALUE")
            pairs[name] = text
        value = pairs
    return fields.env(value)


def _unfolded(value: Any) -> Any:
    """Without the newline that YAML's ``>`` and ``|`` leave at the end of a text."""
    return value.removesuffix("\n") if isinstance(value, str) else value


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = shlex.split(fields.one_line(_unfolded(value)))
        except ValueError as fault:
            raise ValueError(
                f"{value!r} cannot be split into words as a shell would: {fault}"
            ) from None
    return tuple_of(fields.one_line)(value)


def _list_of(read: Reader[Any]) -> Reader[tuple[Any, ...]]:
    """Reader of a list, or of its only item."""
    return lambda value: tuple_of(read)([value] if isinstance(value, str) else value)


def _setup_line(value: Any) -> str:
    line = fields.one_line(_unfolded(value))
    if re.search(r"(?<!\\)(\\\\)*\\$", line):
        raise ValueError(
            f"{line!r} ends in a backslash, which would join it with the next line of the script"
        )
    return line


def _path(value: Any) -> str:
    """``~`` stands for the home of who submits; one of nobody stays, and is then a file that is not there."""
    return os.path.expanduser(fields.filled_text(value))


def _conda_env(value: Any) -> str:
    return _path(value) if "/" in str(value) else fields.filled_text(value)


def _balance(value: Any) -> str:
    text = _path(value)
    known = ["equal", "measured"]
    if text not in known and not re.search(r"[./]", text) and not os.path.exists(text):
        raise ValueError(f"{text!r} is no file{did_you_mean(text, known)}")
    return text


def _job_name(value: Any) -> str:
    name = fields.plain_text(value)
    if not name or "/" in name or name != name.strip():
        raise ValueError(
            f"{value!r} is not a job name: it becomes part of the log's file name, so no / and no blank ends"
        )
    return name


def _node_list(value: Any) -> tuple[str, ...]:
    return (
        tuple(expand_hostlist(fields.one_line(value)))
        if isinstance(value, str)
        else tuple_of(fields.word)(value)
    )


@dataclass(frozen=True, init=False)
class JobOptions(Schema):
    """One job. The fields are job.yaml's keys and the long options, with ``-`` for ``_``."""

    command: tuple[str, ...] = key(_words, (), "COMMAND", "what every rank runs, after --")
    nodes: tuple[str, ...] | None = key(
        _node_list,
        None,
        "LIST",
        "only these nodes, as a host list such as gpu[01-03],alpha; the first, or of those alike "
        "the first by name, is the host of rank 0",
    )
    gpus: int | None = key(
        fields.positive_number, None, "N", "only the first N GPUs, in the order of the nodes"
    )
    name: str | None = key(_job_name, None, "NAME", "the job's name")
    time: str | None = key(
        fields.time_limit, None, "TIME", "time limit in Slurm's format, such as 12:00:00 or 2-00"
    )
    output: str = key(
        fields.filled_text,
        "%x-%j.out",
        "FILE",
        "log file; %x is the job's name, %j its id (in the file's name only); ~ and $USER are expanded, folders are "
        "made",
    )
    partition: str | None = key(
        fields.partitions,
        None,
        "NAME",
        "partition of all components; default each node's own in cluster.yaml",
    )
    account: str | None = key(fields.word, None, "NAME", "the account to charge")
    qos: str | None = key(fields.word, None, "NAME", "quality of service")
    cpus_per_task: int | None = key(
        fields.positive_number,
        None,
        "N",
        "CPU cores of each rank; default a node's cpus divided by its GPUs",
    )
    memory: int | None = key(
        fields.memory_mb,
        None,
        "SIZE",
        f"memory on each node, {fields.MEMORY_FORM}; default the node's, in proportion to the GPUs used",
    )
    signal_seconds: int | None = key(
        fields.positive_number,
        None,
        "N",
        "send the ranks SIGUSR2 this many seconds before the time limit: they save a snapshot and stop",
    )
    max_restarts: int = key(
        fields.whole_number,
        0,
        "N",
        "requeue the job at most N times: after a stop at the time limit, or after a node failed; with "
        "torchrun also: start the ranks again at most N times after one of them failed",
    )
    env: dict[str, str] = key(_env, {}, "NAME=VALUE", "a variable for the ranks; can be repeated")
    setup: tuple[str, ...] = key(
        _list_of(_setup_line),
        (),
        "LINE",
        "a shell line to run first, on the batch host, such as 'module load cuda'; can be repeated",
    )
    python: str | None = key(_path, None, "PATH", "what 'python' in the command stands for")
    conda_env: str | None = key(
        _conda_env, None, "NAME", "conda environment to activate, a name or a path"
    )
    venv: str | None = key(
        _path, None, "FOLDER", "virtual environment to use, the folder that holds bin/python"
    )
    ranks: str = key(
        fields.one_of("gpu", "node"),
        "gpu",
        "gpu|node",
        "gpu: a rank for each GPU; node: one for each node, which drives all its GPUs",
    )
    launcher: str = key(
        fields.one_of("srun", "torchrun"),
        "srun",
        "srun|torchrun",
        "what starts the ranks of a Slurm job: srun, one task a GPU, or torchrun, one a node",
    )
    container: Container | None = key(
        Container.read,
        None,
        "ENGINE:IMAGE",
        "what to run in; under Slurm pyxis or apptainer, without it docker or apptainer",
    )
    mount: tuple[Mount, ...] = key(
        _list_of(Mount.read),
        (),
        "SOURCE[:TARGET[:ro]]",
        "what to mount in the container besides the working folder; can be repeated",
    )
    container_network: str | None = key(
        fields.word,
        None,
        "NAME",
        "docker's overlay network that joins the nodes' containers; default the nodes' own network",
    )
    global_batch_size: int | None = key(
        fields.positive_number,
        None,
        "N",
        "samples of one optimizer step over all ranks; the same update however it is shared out",
    )
    balance: str = key(
        _balance,
        "equal",
        "equal|measured|FILE",
        "how the global batch is shared out: 'equal', 'measured' (at the start), or a YAML file of speeds",
    )
    sbatch: tuple[SbatchOption, ...] = key(
        _list_of(SbatchOption.read),
        (),
        "KEY=VALUE",
        "any other sbatch option, or COMPONENT:KEY=VALUE for one component; can be repeated",
    )

    def merged_with(self, other: "JobOptions") -> "JobOptions":
        """These options under the ``other`` ones; env, setup, mount and sbatch add up."""
        given = {name: getattr(other, name) for name in other.given}
        added = {
            "env": {**self.env, **other.env},
            "setup": self.setup + other.setup,
            "sbatch": self.sbatch + other.sbatch,
            "mount": self.mount + other.mount,
        }
        return self.replaced(**{**given, **added})

    def check_together(self) -> None:
        """Raises OptionsError for options that do not go together."""
        if self.command and self.command[0].startswith("-"):
            raise OptionsError(
                f"the command begins with {self.command[0]!r}, which srun would take for an option of its own; "
                "did you forget python?"
            )
        environments = [
            name for name in ("python", "conda_env", "venv") if getattr(self, name) is not None
        ]
        if len(environments) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in environments)
            raise OptionsError(f"{names} cannot be given together: each names the interpreter")
        if self.balance not in ("equal", "measured") and self.global_batch_size is None:
            raise OptionsError(
                f"--balance {self.balance} needs --global-batch-size, the number of samples to share out"
            )
        if self.container is None and (self.mount or self.container_network):
            raise OptionsError(
                "--mount and --container-network need --container, which they are about"
            )
        if self.container_network and self.container and self.container.engine != "docker":
            raise OptionsError(
                f"--container-network is docker's; {self.container.engine} uses the nodes' own network"
            )
        if self.container is not None and (self.conda_env or self.venv):
            raise OptionsError(
                "--conda-env and --venv are the node's; a container has its own Python: give --python"
            )
        if self.signal_seconds is not None:
            if self.time is None:
                raise OptionsError("--signal-seconds needs --time, the limit that it comes before")
            limit = fields.limit_seconds(self.time)
            if limit is not None and self.signal_seconds >= limit:
                raise OptionsError(
                    f"--signal-seconds {self.signal_seconds}: the signal would come before the job has begun; "
                    f"--time {self.time} is {limit} seconds"
                )

    @property
    def interpreter(self) -> str:
        """What ``python`` stands for, and what torchrun is started with."""
        if self.python:
            return self.python
        return self.command[0] if self.command[:1] in (("python",), ("python3",)) else "python3"

    @property
    def task_command(self) -> tuple[str, ...]:
        """The command with the chosen interpreter: ``train.py ...`` and ``python ...`` begin with ``python``'s path."""
        if not self.command:
            return ()
        first, rest = self.command[0], self.command[1:]
        interpreter = self.interpreter
        if first in ("python", "python3"):
            return (interpreter if self.python else first, *rest)
        return (interpreter, *self.command) if first.endswith(".py") else self.command
