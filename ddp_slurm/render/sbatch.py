"""A plan as the text of a job. Pure: the same plan gives the same bytes."""

from pathlib import Path

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.plan import Plan
from ddp_slurm.rank_env import FIRST_PORT, PORT_COUNT
from ddp_slurm.render.containers import FOLDER_CHECK, apptainer_words, pyxis_options
from ddp_slurm.render.templating import render_template
from ddp_slurm.render.torchrun import RENDEZVOUS_SECONDS

MAX_COMPONENTS = 128
"""MAX_HET_JOB_COMPS in Slurm's source. sbatch 22.05 accepts more and leaves the job pending for ever."""


class RenderError(DdpSlurmError):
    """A plan that Slurm cannot run as one job."""


def render_sbatch(plan: Plan, runs_folder: Path | None = None) -> str:
    """The sbatch script of a plan: a heterogeneous job, or a plain one where all nodes have one shape.

    With ``runs_folder`` the script leaves its exit marker in ``runs_folder/JOBID``.
    Raises RenderError for what Slurm would refuse, or misread without a word.
    """
    components = plan.components
    if len(components) > MAX_COMPONENTS:
        raise RenderError(
            f"the plan has {len(components)} components, Slurm takes {MAX_COMPONENTS} at most; nodes of one shape "
            "share a component (gpus, cpus, memory, partition, constraint, interface, env): "
            "give such nodes the same values"
        )
    without_memory = [c.nodelist for c in components if c.memory_mb is None]
    if without_memory and len(without_memory) < len(components):
        raise RenderError(
            f"memory is given for some nodes but not for {', '.join(without_memory)}: sbatch would give these the "
            "first component's; set it for all nodes of cluster.yaml, or --memory for all"
        )
    for item in plan.options.sbatch:
        if item.component is not None and item.component >= len(components):
            raise RenderError(
                f"--sbatch {item.component}:{item.key}: there are only components 0 to {len(components) - 1}"
            )
    if not plan.options.command:
        raise RenderError(
            "no command: put what every rank runs after --, as in: -- python train.py"
        )
    if ":" in plan.options.command:
        raise RenderError(
            "the command has the word ':', which srun takes for the next component; write it another way"
        )
    return render_template(
        "job.sbatch.j2",
        plan=plan,
        options=plan.options,
        runs_folder=runs_folder,
        **_container_values(plan),
        rendezvous_seconds=RENDEZVOUS_SECONDS,
        first_port=FIRST_PORT,
        port_count=PORT_COUNT,
    )


def _container_values(plan: Plan) -> dict[str, object]:
    """What the template puts into each component's segment of srun for a container."""
    container, mounts = plan.options.container, plan.options.mount
    engine = container.engine if container else None
    if engine == "docker":
        raise RenderError(
            "--container docker:... escapes Slurm's limits and its GPUs; under Slurm use pyxis:... or apptainer:..."
        )
    names = {"PYTHONUNBUFFERED": "", **plan.step_env(), **plan.options.env}
    return {
        "folder_check": FOLDER_CHECK,
        "pyxis_options": [
            pyxis_options(container, mounts, {**names, **component.task_env})
            if container and engine == "pyxis"
            else []
            for component in plan.components
        ],
        "container_words": apptainer_words(container, mounts)
        if container and engine == "apptainer"
        else [],
    }
