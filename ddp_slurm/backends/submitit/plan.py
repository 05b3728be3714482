"""From an executor's parameters to a plan, its script and a submitted job. The submitting side only."""

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_slurm.backends import sbatch
from ddp_slurm.backends.submitit.rank import NAME, utils
from ddp_slurm.cluster import Cluster
from ddp_slurm.job.log_path import RUNS_FOLDER, log_path
from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.plan.request import DEFAULT_CLUSTER, Request, load_cluster, load_options
from ddp_slurm.render import render_sbatch
from ddp_slurm.runs.run_folder import keep_run, make_runs_folder
from ddp_slurm.schema.fields import limit_seconds
from ddp_slurm.schema.schema import keys_of

__all__ = ["OptionsError", "merged_parameters", "minutes", "plan_of", "script_of", "submit"]


def merged_parameters(
    parameters: Mapping[str, Any], added: Mapping[str, Any], job: Path | None
) -> dict[str, Any]:
    """An executor's parameters with those of ``update_parameters``. Raises OptionsError with all that is wrong.

    ``timeout_min`` is for submitit, which counts from it whether a job has timed out.
    """
    new = _from_generic(added)
    known = set(keys_of(JobOptions)) - {"command"}
    unknown = sorted(set(new) - known)
    if unknown:
        raise OptionsError(
            f"unknown parameters {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    merged = {name: value for name, value in parameters.items() if name != "timeout_min"} | new
    return {**merged, "timeout_min": minutes(_options(merged, job).time)}


def _options(parameters: Mapping[str, Any], job: Path | None) -> JobOptions:
    """``nodes`` as a number is not the plan's option; ``plan_of`` sees to it."""
    number_of_nodes = isinstance(parameters.get("nodes"), int)
    left_out = {"timeout_min", "nodes"} if number_of_nodes else {"timeout_min"}
    return load_options(
        Request(None, job, {k: v for k, v in parameters.items() if k not in left_out})
    )


def plan_of(
    parameters: Mapping[str, Any], cluster: Cluster | Path | str | None, job: Path | None
) -> Plan:
    """Who would run where. Raises DdpSlurmError."""
    options = _options(parameters, job)
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(Path(cluster) if cluster else None, local=False, gpus=None)
    nodes = parameters.get("nodes")
    if isinstance(nodes, int):
        with_gpus = tuple(node.name for node in cluster.nodes if node.gpu_count)
        if not 0 < nodes <= len(with_gpus):
            raise OptionsError(f"nodes={nodes}: the cluster has {len(with_gpus)} nodes with GPUs")
        options = options.replaced(nodes=with_gpus[:nodes])
    return make_plan(cluster, options)


def script_of(plan: Plan, folder: Path, max_restarts: int, signal_seconds: int | None) -> str:
    """The job script; ``max_restarts`` and ``signal_seconds`` hold where the options do not say."""
    return render_sbatch(
        _task_plan(plan, folder, max_restarts, signal_seconds), _runs_folder(folder)
    )


def _task_plan(plan: Plan, folder: Path, max_restarts: int, signal_seconds: int | None) -> Plan:
    """The plan with submitit's own runner as the task."""
    options = plan.options
    if options.launcher != "srun":
        raise OptionsError(
            f"--launcher {options.launcher} does not go with submitit, which needs one task a rank"
        )
    paths = utils.JobPaths(folder)
    named = options.python or options.conda_env or options.venv or options.container
    # what ranks left before they were requeued is not this run's result, and stops submitit's writer
    stale = (
        shlex.quote(str(paths.result_pickle))
        .replace("%j", "'\"$SLURM_JOB_ID\"'")
        .replace("%t", "'*'")
    )
    stale = stale if stale.startswith("'") else f"'{stale}'"
    changed = {
        "command": (
            "python" if named else sys.executable,
            "-u",
            "-m",
            "submitit.core._submit",
            str(folder),
        ),
        "output": _output(options, folder),
        "env": {**options.env, "SUBMITIT_EXECUTOR": NAME},
        "setup": (*options.setup, f"rm -f -- {stale} {stale}.save_tmp"),
        "signal_seconds": options.signal_seconds or signal_seconds,
        "max_restarts": options.max_restarts if "max_restarts" in options.given else max_restarts,
    }
    return replace(plan, options=options.replaced(**changed))


def _output(options: JobOptions, folder: Path) -> str:
    """One log for all ranks, where submitit puts rank 0's."""
    if "output" in options.given:
        return options.output
    log = str(utils.JobPaths(folder).stdout).replace("%t", "0")
    fixed = str(utils.JobPaths.get_first_id_independent_folder(folder))
    return log.replace(
        fixed, fixed.replace("%", "%%"), 1
    )  # for sbatch, to which any % begins a pattern


def _runs_folder(folder: Path) -> Path:
    independent = utils.JobPaths.get_first_id_independent_folder(folder)
    return independent if independent.name == RUNS_FOLDER else independent / RUNS_FOLDER


def submit(
    plan: Plan,
    script: str,
    folder: Path,
    cluster: Cluster | Path | str | None,
    cluster_file: Path | None,
) -> str:
    """Give the script to sbatch and keep the run. Returns the job's id; raises DdpSlurmError."""
    runs = _runs_folder(folder)
    make_runs_folder(runs)
    now = time.time()
    job_id = sbatch.submit(script)
    if cluster_file is None and not isinstance(cluster, Cluster):
        path = Path(cluster) if cluster else DEFAULT_CLUSTER
        cluster_file = path if path.exists() else None
    logged = plan.options.replaced(output=_output(plan.options, folder))
    keep_run(
        plan,
        runs=runs,
        job_id=job_id,
        backend="submitit",
        script=script,
        cluster_file=cluster_file,
        submitted_at=now,
        log=log_path(logged, plan.name, job_id),
    )
    return job_id


def _from_generic(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """submitit's own words for the parameters that all its executors share, as keys of job.yaml."""
    values = {name: value for name, value in parameters.items() if value is not None}
    for word in ("gpus_per_node", "tasks_per_node"):
        if word in values:
            raise OptionsError(
                f"{word}={values[word]!r}: the plan decides, a rank for each GPU of each node; for a part of the "
                "cluster use nodes or gpus"
            )
    if values.pop("stderr_to_stdout", True) is not True:
        raise OptionsError(
            "stderr_to_stdout=False: both streams of all ranks go to one log, labelled by rank"
        )
    if "timeout_min" in values:
        values["time"] = values.pop("timeout_min")
    if "mem_gb" in values:
        values["memory"] = _memory(values.pop("mem_gb"))
    if isinstance(values.get("time"), int):
        values["time"] = str(values["time"])
    if isinstance(values.get("env"), Mapping):
        values["env"] = {name: str(value) for name, value in values["env"].items()}
    return values


def _memory(gigabytes: object) -> str:
    if isinstance(gigabytes, int | float) and 1 / 1024 <= gigabytes < float("inf"):
        return f"{int(gigabytes * 1024)}M"
    raise OptionsError(f"mem_gb={gigabytes!r} is not a number of gigabytes, such as 64 or 1.5")


def minutes(time_limit: str | None) -> int:
    """A time limit in Slurm's format as whole minutes, rounded up; 0 where there is none.

    >>> [minutes(text) for text in ("90", "1:30", "2:00:00", "1-12", "1-00:30")]
    [90, 2, 120, 2160, 1470]
    """
    return -(-(limit_seconds(time_limit) or 0) // 60) if time_limit else 0
