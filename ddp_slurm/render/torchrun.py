"""A plan as torchrun commands, one line of bash for each node.

Pure: the same plan gives the same bytes. The rendezvous is torchrun's static one. Its dynamic one
(c10d) would assign node ranks in the order of host names and ignore ``--node-rank``: each rank's
share of the batch would go to another node's GPU; and it does not survive its own host either.
"""

from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.options import NO_COMMAND, PYTHONS
from ddp_slurm.job_env import JobEnv
from ddp_slurm.plan import Component, Plan
from ddp_slurm.rank_env import FIRST_PORT, PORT_COUNT
from ddp_slurm.render.containers import FOLDER_CHECK, apptainer_words, docker_words
from ddp_slurm.render.quoting import shell_quote, shell_value

RENDEZVOUS_SECONDS = 180
"""How long torchrun waits for the other nodes: time to start Python from a cold disk, or to paste
a line by hand."""


class TorchrunError(DdpSlurmError):
    """A plan that torchrun cannot run."""


@dataclass(frozen=True)
class NodeCommand:
    """What one node runs."""

    node: str
    line: str
    """For bash, in a subshell: the shell that it is typed into keeps its folder and variables."""
    clean_up: str
    """A line that removes what would outlive the killed command, or an empty text."""


@dataclass(frozen=True)
class _Run:
    """What the commands of all nodes have in common."""

    plan: Plan
    folder: str
    python: str
    """The interpreter where the options name none."""
    attempt: int

    @cached_property
    def id(self) -> int:
        names = [node.name for node in self.plan.machines]
        return crc32("\0".join([self.plan.name, self.folder, *names]).encode())

    @property
    def master_port(self) -> str:
        """A restart gets another port: the one before may still be in use."""
        derived = FIRST_PORT + (self.id + self.attempt) % PORT_COUNT
        return self.plan.options.env.get("MASTER_PORT") or str(derived)

    @property
    def master_address(self) -> str:
        first = self.plan.machines[0]
        if self.plan.options.container_network:
            return self.container_name(first.name)
        address = self.plan.options.env.get("MASTER_ADDR") or first.address or first.name
        if "%" in address:
            raise TorchrunError(
                f"{first.name}: the address {address!r} is valid on one link only; the other nodes "
                "need one that is routed"
            )
        return address

    def container_name(self, node: str) -> str:
        return f"ddp-slurm-{self.id:08x}-{node}"


def render_torchrun(
    plan: Plan,
    folder: str,
    python: str,
    attempt: int = 0,
    secrets: JobEnv | None = None,
) -> tuple[NodeCommand, ...]:
    """One torchrun a node, all with one rendezvous.

    Args:
        folder: where the command runs, on every node.
        python: the interpreter where the options name none.
        attempt: how often the ranks were started before.
        secrets: the tokens of the job; lines that are printed have none.

    Raises TorchrunError where the plan cannot run that way.
    """
    _check(plan)
    run = _Run(plan, folder, python, attempt)
    tokens = secrets.to_environ() if secrets else {}
    commands: list[NodeCommand] = []
    for component in plan.components:
        environ = {**node_environ(plan, component), **tokens}
        for node in component.nodes:
            words = _torchrun_words(run, component, node_rank=len(commands))
            commands.append(_node_command(run, node, words, environ))
    return tuple(commands)


def node_environ(plan: Plan, component: Component) -> dict[str, str]:
    """Variables of every rank on the component's nodes."""
    # The node's interfaces do not exist inside an overlay network.
    in_network = plan.options.container_network is not None
    own = component.env_without_interface if in_network else component.task_env
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        **plan.job_env().to_environ(),
        **plan.options.env,
        **own,
    }


def network_commands(plan: Plan) -> list[str]:
    """How docker's overlay network is created, a line for each node; empty where none is used."""
    network = plan.options.container_network
    if not network:
        return []
    first, *others = plan.machines
    first_address = first.address or first.name
    swarm = _host_port(first_address, 2377)
    create = f"docker network create --driver overlay --attachable {shell_quote(network)}"
    init = f"docker swarm init --advertise-addr {shell_quote(first_address)}"
    lines = [f"on {first.name}: {init} && {create}"]
    for node in others:
        address = shell_quote(node.address or node.name)
        join = f'docker swarm join --advertise-addr {address} --token "$TOKEN" {shell_quote(swarm)}'
        lines.append(f"on {node.name}: {join}")
    show_token = "docker swarm join-token --quiet worker"
    lines.append(f"where TOKEN is what this prints on {first.name}: {show_token}")
    return lines


def _host_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _check(plan: Plan) -> None:
    options = plan.options
    if not options.command:
        raise TorchrunError(NO_COMMAND)
    if options.container is not None and options.container.engine == "pyxis":
        raise TorchrunError(
            "--container pyxis:... is a plug-in of Slurm; without Slurm use docker:... or "
            "apptainer:..."
        )


def _node_command(
    run: _Run, node: str, torchrun_words: list[str], environ: dict[str, str]
) -> NodeCommand:
    exports = " ".join(f"{name}={shell_value(value)}" for name, value in environ.items())
    words = [*_container_words(run, node, environ), *torchrun_words, *_task_words(run)]
    steps = [
        f"cd {shell_quote(run.folder)}",
        *_preparation(run.plan),
        f"export {exports}",
        f"exec {' '.join(words)}",
    ]
    container = run.plan.options.container
    clean_up = ""
    if container is not None and container.engine == "docker":
        clean_up = f"docker rm --force {shell_quote(run.container_name(node))}"
    return NodeCommand(node, f"( {' && '.join(steps)} )", clean_up)


def _torchrun_words(run: _Run, component: Component, node_rank: int) -> list[str]:
    return [
        _interpreter(run),
        "-m",
        "torch.distributed.run",
        f"--nnodes={run.plan.node_count}",
        f"--nproc-per-node={component.tasks_per_node}",
        f"--node-rank={node_rank}",
        f"--master-addr={shell_quote(run.master_address)}",
        f"--master-port={shell_quote(run.master_port)}",
        f"--rdzv-id={run.id:08x}",
        f"--rdzv-conf=timeout={RENDEZVOUS_SECONDS}",
        "--max-restarts=0",
        "--no-python",
    ]


def _interpreter(run: _Run) -> str:
    """The Python that runs torchrun, quoted: of the options or the container, else run.python."""
    options = run.plan.options
    return shell_quote(options.interpreter if options.names_python else run.python)


def _task_words(run: _Run) -> list[str]:
    """The command, quoted; a bare python is the same interpreter as torchrun's."""
    options = run.plan.options
    first, *rest = options.task_command
    if first in PYTHONS and not options.python:
        return [_interpreter(run), *map(shell_quote, rest)]
    return [*map(shell_quote, options.task_command)]


def _preparation(plan: Plan) -> list[str]:
    """Commands that come first.

    They are joined by ``&&``; eval keeps a comment at the end of a setup line from hiding the rest.
    """
    options = plan.options
    steps = [f"eval {shell_quote(line)}" for line in options.setup]
    if options.conda_env:
        steps.append('eval "$("${CONDA_EXE:-conda}" shell.bash hook)"')
        steps.append(f"conda activate {shell_quote(options.conda_env)}")
    elif options.venv:
        steps.append(f"export VIRTUAL_ENV={shell_quote(options.venv)}")
        steps.append('export PATH="$VIRTUAL_ENV/bin:$PATH"')
    if options.container:
        steps.append(FOLDER_CHECK)
    return steps


def _container_words(run: _Run, node: str, environ: dict[str, str]) -> list[str]:
    options = run.plan.options
    if options.container is None:
        return []
    if options.container.engine == "apptainer":
        return apptainer_words(options.container, options.mount)
    return docker_words(
        options.container,
        options.mount,
        name=run.container_name(node),
        network=options.container_network,
        env_names=environ,
    )
