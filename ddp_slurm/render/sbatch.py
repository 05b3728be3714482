"""A plan as the text of a job. Pure: the same plan gives the same bytes."""

from itertools import accumulate
from pathlib import Path

from ddp_slurm import job_env
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.options import NO_COMMAND
from ddp_slurm.launchers import ACCELERATORS
from ddp_slurm.plan import Plan
from ddp_slurm.rank_env import FIRST_PORT, PORT_COUNT
from ddp_slurm.render.containers import FOLDER_CHECK
from ddp_slurm.render.quoting import shell_words
from ddp_slurm.render.sbatch_lines import Segment, components_env, job_directives, segments_of
from ddp_slurm.render.templating import render_template
from ddp_slurm.render.torchrun import RENDEZVOUS_SECONDS

MAX_COMPONENTS = 128
"""MAX_HET_JOB_COMPS in Slurm's source. sbatch 22.05 accepts more and leaves the job pending."""


class RenderError(DdpSlurmError):
    """A plan that Slurm cannot run as one job."""


def render_sbatch(plan: Plan, runs_folder: Path | None = None) -> str:
    """The sbatch script of a plan: a heterogeneous job, or a plain one for nodes of one shape.

    With ``runs_folder`` the script writes its exit marker into ``runs_folder/JOBID``.
    Raises RenderError for what Slurm would refuse, or silently misread.
    """
    _check_components(plan)
    _check_command(plan)
    options = plan.options
    if options.launcher == "torchrun":
        template, launcher_values = "job_torchrun.sbatch.j2", _torchrun_values(plan)
    else:
        template, launcher_values = "job_srun.sbatch.j2", _srun_values(plan)
    segments: list[Segment] = segments_of(plan)
    return render_template(
        template,
        plan=plan,
        job_directives=job_directives(plan),
        segments=segments,
        components=len(segments),
        command=shell_words(options.task_command),
        runs_folder=runs_folder,
        setup=options.setup,
        conda_env=options.conda_env,
        venv=options.venv,
        container=options.container,
        folder_check=FOLDER_CHECK,
        components_env=components_env(plan),
        exports={**plan.job_env().to_environ(), **options.env},
        max_restarts=options.max_restarts,
        watches_first_component=options.max_restarts > 0 and len(segments) > 1,
        signal_seconds=options.signal_seconds,
        requeue_marker=job_env.REQUEUE_MARKER,
        token_name=job_env.TOKEN,
        first_port=FIRST_PORT,
        port_count=PORT_COUNT,
        **launcher_values,
    )


def _srun_values(plan: Plan) -> dict[str, object]:
    tasks = [component.tasks for component in plan.components]
    first_ranks = [0, *accumulate(tasks)][:-1]
    return {"first_ranks": " ".join(map(str, first_ranks))}


def _torchrun_values(plan: Plan) -> dict[str, object]:
    passes_signal_on = plan.options.signal_seconds is not None
    return {
        "accelerators": " ".join(ACCELERATORS),
        "agent": "ddp_slurm.torchrun_agent" if passes_signal_on else "torch.distributed.run",
        "interpreter": shell_words([plan.options.interpreter]),
        "rendezvous_seconds": RENDEZVOUS_SECONDS,
    }


def _check_components(plan: Plan) -> None:
    components = plan.components
    if len(components) > MAX_COMPONENTS:
        raise RenderError(
            f"the plan has {len(components)} components, Slurm accepts at most {MAX_COMPONENTS}; "
            "nodes of one shape share a component (gpus, cpus, memory, partition, constraint, "
            "interface, env): give such nodes the same values"
        )
    without_memory = [item.nodelist for item in components if item.memory_mb is None]
    if without_memory and len(without_memory) < len(components):
        raise RenderError(
            f"memory is given for some nodes but not for {', '.join(without_memory)}: sbatch would "
            "give these the first component's; set it for all nodes of cluster.yaml, or --memory "
            "for all"
        )
    for item in plan.options.sbatch:
        if item.component is not None and item.component >= len(components):
            last = len(components) - 1
            raise RenderError(
                f"--sbatch {item.component}:{item.key}: there are only components 0 to {last}"
            )


def _check_command(plan: Plan) -> None:
    options = plan.options
    if not options.command:
        raise RenderError(NO_COMMAND)
    if ":" in options.command:
        raise RenderError(
            "the command has the word ':', which srun takes for the next component; write it "
            "another way"
        )
    if options.container is not None and options.container.engine == "docker":
        raise RenderError(
            "--container docker:... escapes Slurm's limits and its GPUs; under Slurm use "
            "pyxis:... or apptainer:..."
        )
