"""The keys of job.yaml, which are also the options of ``submit`` and ``plan``."""

from dataclasses import dataclass

from ddp_slurm.comm import EXACT, Comm
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job import values
from ddp_slurm.job.balance_option import EQUAL, Balance
from ddp_slurm.job.containers import Container, Mount
from ddp_slurm.job.memory_option import Memory
from ddp_slurm.job.sbatch_option import SbatchOption
from ddp_slurm.launchers import DATA_NODE, RUN
from ddp_slurm.schema import fields
from ddp_slurm.schema.schema import Schema, key

PYTHONS = ("python", "python3")
NO_COMMAND = "no command: put what every rank runs after --, as in: -- python train.py"


class OptionsError(DdpSlurmError):
    """An option of the job cannot be used."""


@dataclass(frozen=True, init=False)
class JobOptions(Schema):
    """One job. The fields are job.yaml's keys and the long options, with ``-`` for ``_``."""

    command: tuple[str, ...] = key(
        values.words,
        (),
        "COMMAND",
        "what every rank runs, after --",
    )
    nodes: tuple[str, ...] | None = key(
        values.node_list,
        None,
        "LIST",
        "only these nodes, as a host list such as gpu[01-03],alpha; the first, or of those alike "
        "the first by name, is the host of rank 0; 'auto': those that a measured file of speeds "
        "predicts to be fastest",
    )
    gpus: int | None = key(
        fields.positive_number,
        None,
        "N",
        "only the first N GPUs, in the order of the nodes",
    )
    name: str | None = key(
        values.job_name,
        None,
        "NAME",
        "the job's name",
    )
    time: str | None = key(
        fields.time_limit,
        None,
        "TIME",
        "time limit in Slurm's format, such as 12:00:00 or 2-00",
    )
    output: str = key(
        fields.filled_text,
        "%x-%j.out",
        "FILE",
        "log file; %x is the job's name, %j its id (in the file's name only); ~ and $USER are "
        "expanded, folders are made",
    )
    partition: str | None = key(
        fields.partitions,
        None,
        "NAME",
        "partition of all components; default each node's own in cluster.yaml",
    )
    account: str | None = key(
        fields.word,
        None,
        "NAME",
        "the account to charge",
    )
    qos: str | None = key(
        fields.word,
        None,
        "NAME",
        "quality of service",
    )
    cpus_per_task: int | None = key(
        fields.positive_number,
        None,
        "N",
        "CPU cores of each rank; default a node's cpus divided by its GPUs",
    )
    memory: Memory | None = key(
        Memory.read,
        None,
        "SIZE",
        f"memory on each node, {fields.MEMORY_FORM}; for each CPU, as 4G/cpu, where the site "
        "demands --mem-per-cpu; 'none' where it accepts neither; default the node's, in proportion "
        "to the GPUs used",
    )
    signal_seconds: int | None = key(
        fields.positive_number,
        None,
        "N",
        "send the ranks SIGUSR2 this many seconds before the time limit: they save a snapshot and "
        "stop",
    )
    max_restarts: int = key(
        fields.whole_number,
        0,
        "N",
        "requeue the job at most N times: after a stop at the time limit, or after a node failed; "
        "with torchrun also: start the ranks again at most N times after one of them failed",
    )
    env: dict[str, str] = key(
        values.env,
        {},
        "NAME=VALUE",
        "a variable for the ranks; can be repeated",
    )
    setup: tuple[str, ...] = key(
        values.list_of(values.setup_line),
        (),
        "LINE",
        "a shell line to run first, on the batch host, such as 'module load cuda'; can be repeated",
    )
    python: str | None = key(
        values.path,
        None,
        "PATH",
        "what 'python' in the command stands for",
    )
    conda_env: str | None = key(
        values.conda_env,
        None,
        "NAME",
        "conda environment to activate, a name or a path",
    )
    venv: str | None = key(
        values.path,
        None,
        "FOLDER",
        "virtual environment to use, the folder that holds bin/python",
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
        values.list_of(Mount.read),
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
    balance: Balance = key(
        Balance.read,
        EQUAL,
        "equal|measured|adaptive|FILE|TYPE=SPEED,...",
        "how the global batch is shared out: 'equal', 'measured' (at the start), 'adaptive' (and "
        "changed while the Trainer trains), by a file of speeds (ddp-slurm measure writes it), or "
        "by relative speeds such as rtx3090=2,titan=1",
    )
    uneven: bool = key(
        fields.flag,
        False,
        "",
        "train a script that is not written for it on uneven shares of the batch, exactly: one "
        "with DistributedDataParallel and a DataLoader, Lightning, Accelerate or the Hugging Face "
        "Trainer (python -m ddp_slurm.run --uneven)",
    )
    comm: Comm = key(
        Comm.read,
        EXACT,
        "exact|bf16|powersgd|local:STEPS|auto",
        "how the ranks exchange gradients: 'exact'; not exact, for slow networks: 'bf16' between "
        "nodes, 'powersgd', or 'local:STEPS' steps of each rank's own between two averages; "
        "'auto:bf16' and 'auto:local' choose up to that",
    )
    dataset: str | None = key(
        values.server_url,
        None,
        "URL",
        "the server of a data set (ddp-slurm data serve), as http://ADDRESS:PORT: each node "
        "fetches it once, before its ranks begin, and passes it on to the others; the command "
        "finds its folder in DDP_SLURM_DATA",
    )
    dataset_cache: str | None = key(
        values.path,
        None,
        "FOLDER",
        "where each node keeps data sets, on a disk of its own; default "
        "/var/tmp/ddp_slurm_data.UID",
    )
    sbatch: tuple[SbatchOption, ...] = key(
        values.list_of(SbatchOption.read),
        (),
        "KEY=VALUE",
        "any other sbatch option, or COMPONENT:KEY=VALUE for one component; can be repeated",
    )

    def merged_with(self, other: "JobOptions") -> "JobOptions":
        """These options under the ``other`` ones; env, setup, mount and sbatch add up."""
        changed = {name: getattr(other, name) for name in other.given}
        changed["env"] = {**self.env, **other.env}
        for name in ("setup", "mount", "sbatch"):
            changed[name] = getattr(self, name) + getattr(other, name)
        return self.replaced(**changed)

    @property
    def picks_nodes(self) -> bool:
        """--nodes auto: the plan takes the nodes that are predicted to be fastest."""
        return self.nodes is not None and self.nodes[:1] == (values.AUTO,)

    @property
    def names_python(self) -> bool:
        """Whether the options choose the Python of the ranks, or the container that has it."""
        return bool(self.python or self.conda_env or self.venv or self.container)

    @property
    def interpreter(self) -> str:
        """What ``python`` stands for, and what torchrun is started with."""
        if self.python:
            return self.python
        return self.command[0] if self.command and self.command[0] in PYTHONS else "python3"

    @property
    def task_command(self) -> tuple[str, ...]:
        """What every rank runs: the command, and before it what fetches the data set."""
        if not self.command or self.dataset is None:
            return self._own_command
        cache = ("--cache", self.dataset_cache) if self.dataset_cache else ()
        return (self.interpreter, "-m", DATA_NODE, self.dataset, *cache, "--", *self._own_command)

    @property
    def _own_command(self) -> tuple[str, ...]:
        """The command with the chosen interpreter in place of ``python``, or before ``x.py``."""
        if not self.command:
            return ()
        if self.uneven:
            return self._uneven_command
        first, *rest = self.command
        if first in PYTHONS:
            return (self.python or first, *rest)
        if first.endswith(".py"):
            return (self.interpreter, *self.command)
        return self.command

    @property
    def _uneven_command(self) -> tuple[str, ...]:
        if RUN not in self.command:
            return (self.interpreter, "-m", RUN, "--uneven", *self.command)
        index = self.command.index(RUN) + 1
        return (*self.command[:index], "--uneven", *self.command[index:])
