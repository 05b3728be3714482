"""The components of a job: their #SBATCH lines, and their segments of srun's command line."""

from dataclasses import dataclass

from ddp_slurm.job.sbatch_option import SbatchOption
from ddp_slurm.plan import Component, Plan
from ddp_slurm.render.containers import apptainer_words, pyxis_options
from ddp_slurm.render.quoting import directive, shell_quote
from ddp_slurm.schema.fields import memory_text


@dataclass(frozen=True)
class Segment:
    """One component as text."""

    directives: list[str]
    """``nodes=1``: its #SBATCH lines."""
    sizes: str
    """``--nodes=1 --ntasks=4 ...``: srun's options for its sizes."""
    pyxis_options: list[str]
    """srun's options for a container, quoted for a shell."""
    command: str
    """What each of its tasks runs, quoted for a shell."""


@dataclass(frozen=True)
class StepSizes:
    """The tasks that srun starts in a component: one a rank, or with torchrun one a node."""

    nodes: int
    tasks: int
    tasks_per_node: int
    cpus_per_task: int
    shares_cpus: bool = False
    """More tasks than CPUs."""


def job_directives(plan: Plan) -> list[str]:
    """The #SBATCH lines that Slurm reads once for the job."""
    options = plan.options
    return [
        f"job-name={directive(plan.name)}",
        f"output={directive(options.output)}",
        "open-mode=append",
        "requeue" if options.max_restarts else "no-requeue",
    ]


def segments_of(plan: Plan) -> list[Segment]:
    """One segment a component, in order."""
    return [_segment(plan, index) for index in range(len(plan.components))]


def components_env(plan: Plan) -> dict[str, str]:
    """The variables of each component, each under a name that the job script sets for all."""
    return {
        _name_in_script(index, name): value
        for index, component in enumerate(plan.components)
        for name, value in component.task_env.items()
    }


def _name_in_script(index: int, name: str) -> str:
    return f"_ddp_env_{index}_{name}"


def _segment(plan: Plan, index: int) -> Segment:
    component = plan.components[index]
    sizes = _step_sizes(component, plan.options.launcher)
    options = [
        f"--nodes={sizes.nodes}",
        f"--ntasks={sizes.tasks}",
        f"--ntasks-per-node={sizes.tasks_per_node}",
        f"--cpus-per-task={sizes.cpus_per_task}",
    ]
    if sizes.shares_cpus:
        options.append("--overcommit")
    return Segment(
        directives=_directives(plan, index, sizes),
        sizes=" ".join(options),
        pyxis_options=_pyxis_options(plan, component),
        command=_task_command(plan, index),
    )


def _step_sizes(component: Component, launcher: str) -> StepSizes:
    if launcher == "torchrun":
        return _one_task_a_node(component)
    nodes = len(component.nodes)
    return StepSizes(
        nodes,
        component.tasks,
        component.tasks_per_node,
        component.cpus_per_task,
        shares_cpus=component.shared_cpus is not None,
    )


def _one_task_a_node(component: Component) -> StepSizes:
    nodes = len(component.nodes)
    return StepSizes(nodes, nodes, 1, component.cpus_per_node)


def _directives(plan: Plan, index: int, sizes: StepSizes) -> list[str]:
    """Every option in each component: some carry over from the first one, others do not."""
    component, options = plan.components[index], plan.options
    if sizes.shares_cpus:  # sbatch's own --overcommit would refuse so many tasks a node
        sizes = _one_task_a_node(component)
    lines = [
        f"nodes={sizes.nodes}",
        f"nodelist={directive(component.nodelist)}",
        f"ntasks={sizes.tasks}",
        f"ntasks-per-node={sizes.tasks_per_node}",
        f"cpus-per-task={sizes.cpus_per_task}",
        f"gres={directive(component.gres)}",
    ]
    if component.memory_per_cpu_mb:
        lines.append(f"mem-per-cpu={memory_text(component.memory_per_cpu_mb)}")
    elif component.memory_mb:
        lines.append(f"mem={memory_text(component.memory_mb)}")
    where_given = {
        "partition": component.partition,
        "constraint": component.constraint,
        "time": options.time,
        "account": options.account,
        "qos": options.qos,
    }
    lines += [f"{key}={directive(value)}" for key, value in where_given.items() if value]
    if options.signal_seconds:
        lines.append(f"signal=USR2@{options.signal_seconds}")
    for item in options.sbatch:
        if item.component in (None, index):
            lines.append(_sbatch_line(item))
    return lines


def _sbatch_line(item: SbatchOption) -> str:
    return item.key if item.value is None else f"{item.key}={directive(item.value)}"


def _pyxis_options(plan: Plan, component: Component) -> list[str]:
    options = plan.options
    if options.container is None or options.container.engine != "pyxis":
        return []
    names = {
        "PYTHONUNBUFFERED": "",
        **plan.job_env().to_environ(),
        **options.env,
        **component.task_env,
    }
    return pyxis_options(options.container, options.mount, names)


def _task_command(plan: Plan, index: int) -> str:
    component, options = plan.components[index], plan.options
    words = []
    if component.task_env:
        exports = [f'{name}="${_name_in_script(index, name)}"' for name in component.task_env]
        words += ["sh", "-c", shell_quote(f'export {" ".join(exports)}; exec "$@"'), "sh"]
    if options.container is not None and options.container.engine == "apptainer":
        words += apptainer_words(options.container, options.mount)
    if options.launcher == "torchrun":
        words.append('"${_ddp_launch[@]}"')
        words.append(f"--nproc-per-node={component.tasks_per_node}")
        words.append("--no-python")
    words.append('"${_ddp_command[@]}"')
    return " ".join(words)
