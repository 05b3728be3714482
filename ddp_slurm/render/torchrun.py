"""A plan as torchrun commands, one line of bash for each node. Pure: the same plan gives the same bytes.

The rendezvous is torchrun's static one. Its dynamic one (c10d) would hand out node ranks in the order of host names and
ignore ``--node-rank``: each rank's share of the batch would land on another node's GPU; and it does not survive its
own host either.
"""

from dataclasses import dataclass
from zlib import crc32

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.plan import Component, Plan
from ddp_slurm.rank_env import FIRST_PORT, PORT_COUNT
from ddp_slurm.render.containers import FOLDER_CHECK, apptainer_words, docker_words
from ddp_slurm.render.quoting import shell_quote

RENDEZVOUS_SECONDS = 180
"""How long the first torchrun waits for the last: time to start Python on a cold disk, or to paste a line by hand."""


class TorchrunError(DdpSlurmError):
    """A plan that torchrun cannot run."""


@dataclass(frozen=True)
class NodeCommand:
    """What one node runs."""

    node: str
    line: str
    """For bash; it leaves the shell that it is typed into as it was."""
    clean_up: str
    """A line that ends what would outlive the killed command, or nothing."""


def render_torchrun(
    plan: Plan, folder: str, python: str, attempt: int = 0
) -> tuple[NodeCommand, ...]:
    """One torchrun a node, all with one rendezvous.

    Args:
        folder: where the command runs, on every node.
        python: the interpreter where the options name none.
        attempt: a restart gets another port: the one before may still be held.

    Raises TorchrunError where the plan cannot run that way.
    """
    if not plan.options.command:
        raise TorchrunError(
            "no command: put what every rank runs after --, as in: -- python train.py"
        )
    if plan.options.container is not None and plan.options.container.engine == "pyxis":
        raise TorchrunError(
            "--container pyxis:... is a plug-in of Slurm; without Slurm use docker:... or apptainer:..."
        )
    run_id = crc32("\0".join([plan.name, folder, *(node.name for node in plan.machines)]).encode())
    port = plan.options.env.get("MASTER_PORT") or str(FIRST_PORT + (run_id + attempt) % PORT_COUNT)
    commands = []
    nodes = [(component, name) for component in plan.components for name in component.nodes]
    for node_rank, (component, name) in enumerate(nodes):
        words = [
            *_interpreter_words(plan, python),
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(nodes)}",
            f"--nproc-per-node={component.tasks_per_node}",
            f"--node-rank={node_rank}",
            f"--master-addr={shell_quote(_master_address(plan, run_id))}",
            f"--master-port={shell_quote(port)}",
            f"--rdzv-id={run_id:08x}",
            f"--rdzv-conf=timeout={RENDEZVOUS_SECONDS}",
            "--max-restarts=0",
            "--no-python",
            *_task_words(plan, python),
        ]
        environ = node_environ(plan, component)
        container_name = _container_name(run_id, name)
        steps = [
            f"cd {shell_quote(folder)}",
            *_prepare(plan),
            f"export {' '.join(f'{key}={_value(value)}' for key, value in environ.items())}",
            f"exec {' '.join([*_container_words(plan, container_name, environ), *words])}",
        ]
        docker = plan.options.container is not None and plan.options.container.engine == "docker"
        clean_up = f"docker rm --force {shell_quote(container_name)}" if docker else ""
        commands.append(NodeCommand(name, f"( {' && '.join(steps)} )", clean_up))
    return tuple(commands)


def node_environ(plan: Plan, component: Component) -> dict[str, str]:
    """Variables of every rank on the component's nodes."""
    own = component.task_env
    if plan.options.container_network:
        # inside an overlay network the node's interfaces do not exist
        own = {name: value for name, value in own.items() if not name.endswith("_SOCKET_IFNAME")}
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        **plan.step_env(),
        **plan.options.env,
        **own,
    }


def network_commands(plan: Plan) -> list[str]:
    """How docker's overlay network is made, a line for each node; nothing where none was asked for."""
    network = plan.options.container_network
    if not network:
        return []
    first, *others = (node.address or node.name for node in plan.machines)
    make = f"docker network create --driver overlay --attachable {shell_quote(network)}"
    return [
        f"on {plan.machines[0].name}: docker swarm init --advertise-addr {shell_quote(first)} && {make}",
        *(
            f"on {node.name}: docker swarm join --advertise-addr {shell_quote(address)} "
            f'--token "$TOKEN" {shell_quote(_host_port(first, 2377))}'
            for node, address in zip(plan.machines[1:], others, strict=True)
        ),
        f"where TOKEN is what this prints on {plan.machines[0].name}: docker swarm join-token --quiet worker",
    ]


def _value(text: str) -> str:
    quoted = shell_quote(text)
    return (
        f"'{quoted}'" if quoted.startswith("=") else quoted
    )  # zsh takes A==eth0 for a path that it looks up


def _host_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _master_address(plan: Plan, run_id: int) -> str:
    first = plan.machines[0]
    if plan.options.container_network:
        return _container_name(run_id, first.name)
    address = plan.options.env.get("MASTER_ADDR") or first.address or first.name
    if "%" in address:
        raise TorchrunError(
            f"{first.name}: the address {address!r} is a link's own; the other nodes need one that routes"
        )
    return address


def _container_name(run_id: int, node: str) -> str:
    return f"ddp-slurm-{run_id:08x}-{node}"


def _interpreter_words(plan: Plan, python: str) -> list[str]:
    options = plan.options
    named = options.python or options.conda_env or options.venv or options.container
    return [shell_quote(options.interpreter if named else python)]


def _task_words(plan: Plan, python: str) -> list[str]:
    first, *rest = plan.options.task_command
    bare = first in ("python", "python3") and not plan.options.python
    return [
        *(_interpreter_words(plan, python) if bare else [shell_quote(first)]),
        *map(shell_quote, rest),
    ]


def _prepare(plan: Plan) -> list[str]:
    """Commands that come first, for ``&&``: a comment at the end of a setup line must not hide the rest."""
    options = plan.options
    steps = [f"eval {shell_quote(line)}" for line in options.setup]
    if options.conda_env:
        steps += [
            'eval "$("${CONDA_EXE:-conda}" shell.bash hook)"',
            f"conda activate {shell_quote(options.conda_env)}",
        ]
    elif options.venv:
        steps += [
            f"export VIRTUAL_ENV={shell_quote(options.venv)}",
            'export PATH="$VIRTUAL_ENV/bin:$PATH"',
        ]
    if options.container:
        steps.append(FOLDER_CHECK)
    return steps


def _container_words(plan: Plan, name: str, environ: dict[str, str]) -> list[str]:
    options = plan.options
    if options.container is None:
        return []
    if options.container.engine == "apptainer":
        return apptainer_words(options.container, options.mount)
    return docker_words(
        options.container,
        options.mount,
        name=name,
        network=options.container_network,
        env_names=environ,
    )
