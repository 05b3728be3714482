"""What is asked of a job: the keys of job.yaml, which are also the options of ``submit`` and ``plan``."""

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator

from .containers import Container, Mount
from .errors import DdpSlurmError
from .fields import (
    MEMORY_FORM,
    EnvName,
    MemoryMb,
    OneLine,
    PlainText,
    PositiveNumber,
    Schema,
    TimeLimit,
    WholeNumber,
    Word,
    one_line,
    plain_text,
)
from .hostlist import expand_hostlist


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
    **{
        key: f"use --{option}"
        for key, option in {
            "job-name": "name", "time": "time", "output": "output", "partition": "partition", "account": "account",
            "qos": "qos", "cpus-per-task": "cpus-per-task", "mem": "memory", "mem-per-cpu": "memory",
            "mem-per-gpu": "memory", "signal": "signal-seconds", "requeue": "max-restarts",
            "no-requeue": "max-restarts",
        }.items()
    },
}  # fmt: skip


class SbatchOption(Schema):
    """Any other sbatch option, for all components or for one."""

    component: int | None
    key: str
    value: str | None

    @classmethod
    def parse(cls, text: Any) -> "SbatchOption":
        match = re.fullmatch(r"(?:([0-9]{1,3}):)?(?:--)?([a-z][a-z0-9-]*)(?:=(.*))?", plain_text(text))
        if not match:
            raise ValueError(
                f"{text!r} is not KEY=VALUE or COMPONENT:KEY=VALUE, such as 'reservation=lab' or '1:mincpus=4'"
            )
        component, key, value = match.groups()
        if key in SBATCH_KEYS_OF_THE_PLAN:
            raise ValueError(f"{key!r} cannot be set here: {SBATCH_KEYS_OF_THE_PLAN[key]}")
        return cls(component=None if component is None else int(component), key=key, value=value)


def _key_values(value: Any) -> Any:
    """``["K=V", ...]`` of the command line as a mapping."""
    if not isinstance(value, list):
        return value
    pairs = {}
    for item in value:
        name, equals, text = one_line(item).partition("=")
        if not equals:
            raise ValueError(f"{item!r} is not NAME=VALUE")
        pairs[name] = text
    return pairs


def _words(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return tuple(shlex.split(one_line(value)))
        except ValueError as fault:
            raise ValueError(f"{value!r} cannot be split into words as a shell would: {fault}") from None
    return value


def _list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _job_name(value: Any) -> str:
    name = plain_text(value)
    if not name or "/" in name or name != name.strip():
        raise ValueError(
            f"{value!r} is not a job name: it becomes part of the log's file name, so no / and no blank ends"
        )
    return name


def _sbatch_options(value: Any) -> Any:
    return [SbatchOption.parse(item) if isinstance(item, str) else item for item in _list(value)]


def _mounts(value: Any) -> Any:
    return [Mount.parse(item) for item in _list(value)]


def _launcher(value: Any) -> Any:
    if value not in ("srun", "torchrun"):
        raise ValueError(f"{value!r} is not a launcher; srun and torchrun are")
    return value


def _ranks(value: Any) -> Any:
    if value not in ("gpu", "node"):
        raise ValueError(f"{value!r} is not what a rank is for; gpu and node are")
    return value


def _node_list(value: Any) -> tuple[str, ...]:
    return tuple(expand_hostlist(one_line(value))) if isinstance(value, str) else tuple(value)


class JobOptions(Schema):
    """One job. Field names are job.yaml's keys and the long options, with ``_`` or ``-``."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"), populate_by_name=True)

    command: Annotated[tuple[OneLine, ...], BeforeValidator(_words)] = Field((), description="what every rank runs")
    nodes: Annotated[tuple[str, ...] | None, BeforeValidator(_node_list)] = Field(
        None, description="only these nodes, as a host list such as gpu[01-03],alpha; the first is the host of rank 0"
    )
    gpus: PositiveNumber | None = Field(None, description="only the first N GPUs, in the order of the nodes")
    name: Annotated[str, BeforeValidator(_job_name)] | None = Field(None, description="the job's name")
    time: TimeLimit | None = Field(None, description="time limit in Slurm's format, such as 12:00:00 or 2-00")
    output: PlainText = Field(
        "%x-%j.out", description="log file; %x is the job's name, %j its id; ~ and $USER are expanded, folders are made"
    )
    partition: Annotated[str, BeforeValidator(one_line)] | None = Field(
        None, description="partition of all components; default each node's own in cluster.yaml"
    )
    account: Word | None = Field(None, description="the account to charge")
    qos: Word | None = Field(None, description="quality of service")
    cpus_per_task: PositiveNumber | None = Field(
        None, description="CPU cores of each rank; default a node's cpus divided by its GPUs"
    )
    memory: MemoryMb | None = Field(
        None, description=f"memory on each node, {MEMORY_FORM}; default the node's, in proportion to the GPUs used"
    )
    signal_seconds: PositiveNumber | None = Field(
        None,
        description="send the ranks SIGUSR2 this many seconds before the time limit: they save a snapshot and stop",
    )
    max_restarts: WholeNumber = Field(
        0,
        description="requeue the job at most N times: after a stop at the time limit, or after a node failed; with "
        "torchrun also: start the ranks again at most N times after one of them failed",
    )
    env: Annotated[dict[EnvName, PlainText], BeforeValidator(_key_values)] = Field(
        {}, description="NAME=VALUE, a variable for the ranks; can be repeated"
    )
    setup: Annotated[tuple[OneLine, ...], BeforeValidator(_list)] = Field(
        (), description="a shell line to run first, on the batch host, such as 'module load cuda'; can be repeated"
    )
    python: PlainText | None = Field(None, description="the interpreter that 'python' in the command stands for")
    conda_env: PlainText | None = Field(None, description="conda environment to activate, a name or a path")
    venv: PlainText | None = Field(None, description="virtual environment to use, the folder that holds bin/python")
    ranks: Annotated[Literal["gpu", "node"], BeforeValidator(_ranks)] = Field(
        "gpu", description="gpu: a rank for each GPU; node: one for each node, which drives all its GPUs"
    )
    launcher: Annotated[Literal["srun", "torchrun"], BeforeValidator(_launcher)] = Field(
        "srun", description="what starts the ranks of a Slurm job: srun, one task a GPU, or torchrun, one a node"
    )
    container: Annotated[Container, BeforeValidator(Container.parse)] | None = Field(
        None,
        description="ENGINE:IMAGE to run in; under Slurm pyxis or apptainer, without it docker or apptainer",
    )
    mount: Annotated[tuple[Mount, ...], BeforeValidator(_mounts)] = Field(
        (), description="SOURCE[:TARGET[:ro]] to mount in the container besides the working folder; can be repeated"
    )
    container_network: Word | None = Field(
        None, description="docker's overlay network that joins the nodes' containers; default the nodes' own network"
    )
    global_batch_size: PositiveNumber | None = Field(
        None, description="samples of one optimizer step over all ranks; the same update however it is shared out"
    )
    balance: PlainText = Field(
        "equal",
        description="how the global batch is shared out: 'equal', 'measured' (at the start), or a YAML file of speeds",
    )
    sbatch: Annotated[tuple[SbatchOption, ...], BeforeValidator(_sbatch_options)] = Field(
        (), description="KEY=VALUE, any other sbatch option, or COMPONENT:KEY=VALUE for one component; can be repeated"
    )

    @field_validator("partition")
    @classmethod
    def _partition_words(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,+@-]*", value):
            raise ValueError(f"{value!r} is not a partition, or several with commas between them")
        return value

    def merged_with(self, other: "JobOptions") -> "JobOptions":
        """These options under the ``other`` ones; env, setup, mount and sbatch add up."""
        given = {name: getattr(other, name) for name in other.model_fields_set}
        added = {
            "env": {**self.env, **other.env},
            "setup": self.setup + other.setup,
            "sbatch": self.sbatch + other.sbatch,
            "mount": self.mount + other.mount,
        }
        return self.model_copy(update={**given, **added})

    def check_together(self) -> None:
        """Raises OptionsError for options that do not go together."""
        environments = [name for name in ("python", "conda_env", "venv") if getattr(self, name) is not None]
        if len(environments) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in environments)
            raise OptionsError(f"{names} cannot be given together: each names the interpreter")
        if self.balance not in ("equal", "measured") and self.global_batch_size is None:
            raise OptionsError(
                f"--balance {self.balance} needs --global-batch-size, the number of samples to share out"
            )
        if self.container is None and (self.mount or self.container_network):
            raise OptionsError("--mount and --container-network need --container, which they are about")
        if self.container_network and self.container and self.container.engine != "docker":
            raise OptionsError(f"--container-network is docker's; {self.container.engine} uses the nodes' own network")
        if self.container is not None and (self.conda_env or self.venv):
            raise OptionsError("--conda-env and --venv are the node's; a container has its own Python: give --python")
        if self.signal_seconds is not None and self.time is None:
            raise OptionsError("--signal-seconds needs --time, the limit that it comes before")

    @property
    def interpreter(self) -> str:
        """What ``python`` stands for, and what torchrun is started with."""
        if self.python:
            return str(Path(self.python).expanduser())
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
