"""From an executor's parameters to a plan, its script and a submitted job."""

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_slurm.backends import sbatch
from ddp_slurm.backends.submitit.parameters import from_generic, job_keys
from ddp_slurm.backends.submitit.rank import NAME, utils
from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.job.runs_folder import names_of_runs_folder, runs_folder_in
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.plan.request import DEFAULT_CLUSTER, Request, load_cluster, load_options
from ddp_slurm.render import render_sbatch
from ddp_slurm.runs.keep import Submission, keep_run, make_runs_folder, planned_cluster
from ddp_slurm.schema.fields import limit_seconds


def merged_parameters(
    parameters: Mapping[str, Any], added: Mapping[str, Any], job: Path | None
) -> dict[str, Any]:
    """An executor's parameters with those of ``update_parameters``.

    ``timeout_min`` is for submitit, which computes from it whether a job has timed out. Raises
    OptionsError with all that is wrong.
    """
    new = from_generic(added)
    known = job_keys()
    unknown = sorted(set(new) - known)
    if unknown:
        raise OptionsError(
            f"unknown parameters {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    merged = {name: value for name, value in parameters.items() if name != "timeout_min"} | new
    return {**merged, "timeout_min": minutes(_options(merged, job).time)}


def _options(parameters: Mapping[str, Any], job: Path | None) -> JobOptions:
    """The parameters as options, without ``nodes`` if it is a number: the options have none."""
    left_out = {"timeout_min"}
    if isinstance(parameters.get("nodes"), int):
        left_out.add("nodes")
    options = {name: value for name, value in parameters.items() if name not in left_out}
    return load_options(Request(None, job, options))


def what_to_plan(
    parameters: Mapping[str, Any], cluster: Cluster | Path | str | None, job: Path | None
) -> tuple[Cluster, JobOptions]:
    """The cluster and the options that an executor's parameters describe. Raises DdpSlurmError."""
    options = _options(parameters, job)
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(Path(cluster) if cluster else None, local=False, gpus=None)
    nodes = parameters.get("nodes")
    if isinstance(nodes, int):
        options = options.replaced(nodes=_first_nodes(cluster, nodes))
    return cluster, options


def _first_nodes(cluster: Cluster, count: int) -> tuple[str, ...]:
    with_gpus = tuple(node.name for node in cluster.nodes if node.gpu_count)
    if not 0 < count <= len(with_gpus):
        raise OptionsError(f"nodes={count}: the cluster has {len(with_gpus)} nodes with GPUs")
    return with_gpus[:count]


@dataclass(frozen=True)
class TaskJob:
    """A job that runs submitit's own runner on every rank."""

    plan: Plan
    asked: JobOptions
    """What the user asked for: the options to submit the same job with again."""
    folder: Path
    """submitit's folder, which may hold ``%j``."""

    @property
    def script(self) -> str:
        """The job script. Raises DdpSlurmError."""
        return render_sbatch(self.plan, self._runs_folder)

    def submit(self, cluster_file: Path | None) -> str:
        """Submit the job, make its folder and keep the run. Returns the job's id.

        Raises DdpSlurmError.
        """
        script = self.script
        make_runs_folder(self._runs_folder)
        now = time.time()
        job_id = sbatch.submit(script)
        # At once: Slurm ends a job that starts before the folder of its log exists.
        utils.JobPaths(self.folder, job_id).folder.mkdir(parents=True, exist_ok=True)
        submission = Submission(
            self.plan, "submitit", script, now, cluster_file, options=self.asked
        )
        keep_run(submission, self._runs_folder, job_id)
        return job_id

    @property
    def _runs_folder(self) -> Path:
        fixed = utils.JobPaths.get_first_id_independent_folder(self.folder)
        return fixed if fixed.name in names_of_runs_folder() else runs_folder_in(fixed)


def make_task_job(
    wanted: Plan | tuple[Cluster, JobOptions],
    folder: Path,
    max_restarts: int,
    signal_seconds: int | None,
) -> TaskJob:
    """Plan a job of submitit's runner on the ranks of a plan, or of a cluster and options.

    ``max_restarts`` and ``signal_seconds`` are the defaults of the options. Raises DdpSlurmError.
    """
    if isinstance(wanted, Plan):
        cluster, asked = planned_cluster(wanted), wanted.options
        placed = asked.replaced(nodes=None, gpus=None)  # the cluster is what the plan uses
    else:
        cluster, asked = wanted
        placed = asked
    if asked.launcher != "srun":
        raise OptionsError(
            f"--launcher {asked.launcher} cannot be combined with submitit, "
            "which needs one task for each rank"
        )
    restarts = asked.max_restarts if "max_restarts" in asked.given else max_restarts
    options = placed.replaced(
        command=_runner(asked, folder),
        output=_output(asked, folder),
        env={**asked.env, "SUBMITIT_EXECUTOR": NAME},
        setup=(*asked.setup, _removal_of_old_results(folder)),
        signal_seconds=asked.signal_seconds or signal_seconds,
        max_restarts=restarts,
    )
    return TaskJob(make_plan(cluster, options), asked, folder)


def _runner(options: JobOptions, folder: Path) -> tuple[str, ...]:
    python = "python" if options.names_python else sys.executable
    return (python, "-u", "-m", "submitit.core._submit", str(folder))


def _removal_of_old_results(folder: Path) -> str:
    """A line of shell that removes what the ranks left before the job was requeued.

    It is not this start's result, and submitit does not overwrite it.
    """
    pattern = shlex.quote(str(utils.JobPaths(folder).result_pickle))
    if not pattern.startswith("'"):
        pattern = f"'{pattern}'"
    files = pattern.replace("%j", "'\"$SLURM_JOB_ID\"'").replace("%t", "'*'")
    return f"rm -f -- {files} {files}.save_tmp"


def _output(options: JobOptions, folder: Path) -> str:
    """One log for all ranks, where submitit would put rank 0's."""
    if "output" in options.given:
        return options.output
    log = str(utils.JobPaths(folder).stdout).replace("%t", "0")
    fixed = str(utils.JobPaths.get_first_id_independent_folder(folder))
    # For sbatch any % begins a pattern.
    return log.replace(fixed, fixed.replace("%", "%%"), 1)


def cluster_file_of(cluster: Cluster | Path | str | None) -> Path | None:
    """The file that describes the cluster, where there is one."""
    if isinstance(cluster, Cluster):
        return None
    path = Path(cluster) if cluster else DEFAULT_CLUSTER
    return path if path.exists() else None


def minutes(time_limit: str | None) -> int:
    """A time limit in Slurm's format as whole minutes, rounded up; 0 without a limit.

    >>> [minutes(text) for text in ("90", "1:30", "2:00:00", "1-12", "1-00:30")]
    [90, 2, 120, 2160, 1470]
    """
    limit = limit_seconds(time_limit) if time_limit else None
    return -(-(limit or 0) // 60)
