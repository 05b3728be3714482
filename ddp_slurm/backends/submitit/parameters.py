"""submitit's names of parameters, as keys of job.yaml.

The generic ones, which all executors of submitit share, and those of its own Slurm executor
(``slurm_partition``), which existing scripts have.
"""

from collections.abc import Mapping
from types import FrameType
from typing import Any

from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.schema.schema import keys_of

SLURM = "slurm_"
THE_PLAN = (
    "the plan decides, one rank for each GPU of each node; for a part of the cluster use nodes or "
    "gpus"
)
OF_THE_PLAN = (
    "gpus_per_node",
    "tasks_per_node",
    "ntasks_per_node",
    "gpus_per_task",
    "num_gpus",
    "cpus_per_gpu",
    "mem_per_gpu",
    "gres",
)
WITHOUT_COUNTERPART = {
    "array_parallelism": "jobs are submitted one by one, and Slurm limits how many run",
    "srun_args": "the job script's srun lines are the plan's; use sbatch or env",
    "teardown": "a script has no lines after srun; do it at the end of the function",
    "use_srun": "each rank is a task of srun",
}
RENAMED = {
    "job_name": "name",
    "mem": "memory",
    "nodelist": "nodes",
    "signal_delay_s": "signal_seconds",
}
ADDITIONAL = "additional_parameters"
OF_SBATCH = (
    "comment",
    "constraint",
    "dependency",
    "exclude",
    "exclusive",
    "mail_type",
    "mail_user",
    "wckey",
)


def job_keys() -> set[str]:
    """The keys of job.yaml that an executor takes."""
    return set(keys_of(JobOptions)) - {"command"}


def given_for_slurm(caller: FrameType) -> dict[str, Any]:
    """The ``slurm_*`` parameters of an AutoExecutor that is calling, without that prefix.

    AutoExecutor passes on what has its executor's own prefix, and drops the others silently.
    """
    if not str(caller.f_globals.get("__name__", "")).startswith("submitit."):
        return {}
    given = caller.f_locals.get("kwargs", {})
    return {
        name.removeprefix(SLURM): value
        for name, value in given.items()
        if name.startswith(SLURM) and value is not None
    }


def from_slurm(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of submitit's Slurm executor as keys of job.yaml.

    ``additional_parameters`` may hold keys of job.yaml too: AutoExecutor takes them in no other
    way, since it ends a prefix at the first ``_`` of this executor's name. Raises OptionsError.
    """
    others = dict(parameters)
    added = {name.replace("-", "_"): x for name, x in others.pop(ADDITIONAL, {}).items()}
    values = {name: value for name, value in added.items() if name in job_keys()}
    sbatch = [_sbatch_option(*item) for item in added.items() if item[0] not in values]
    for name, value in others.items():
        if name in OF_THE_PLAN or name in WITHOUT_COUNTERPART:
            why = WITHOUT_COUNTERPART.get(name, THE_PLAN)
            raise OptionsError(f"{SLURM}{name}={value!r}: {why}")
        if name in OF_SBATCH:
            sbatch.append(_sbatch_option(name, value))
        elif name == "mem_per_cpu":
            values["memory"] = f"{value}/cpu"
        else:
            values[RENAMED.get(name, name)] = value
    return {**values, "sbatch": [*values.get("sbatch", []), *sbatch]} if sbatch else values


def _sbatch_option(name: str, value: object) -> str:
    key = name.replace("_", "-")
    return key if value is True else f"{key}={value}"


def from_generic(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """submitit's parameters that all its executors share, as keys of job.yaml.

    Raises OptionsError.
    """
    values = {name: value for name, value in parameters.items() if value is not None}
    for name in ("gpus_per_node", "tasks_per_node"):
        if name in values:
            raise OptionsError(f"{name}={values[name]!r}: {THE_PLAN}")
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
