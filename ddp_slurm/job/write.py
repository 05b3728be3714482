"""The options of a job as the text of a job.yaml."""

from typing import Any

import yaml

from ddp_slurm.job.options import JobOptions
from ddp_slurm.schema.schema import keys_of


def job_yaml(options: JobOptions) -> str:
    """A job.yaml that gives the same options again; keys with their default values are left out."""
    values = {}
    for name, key in keys_of(JobOptions).items():
        value = getattr(options, name)
        if value != key.default:
            values[name.replace("_", "-")] = _as_written(name, value)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1_000_000)


def _as_written(name: str, value: Any) -> Any:
    if name in ("balance", "comm", "container", "memory"):
        return str(value)
    if name in ("sbatch", "mount"):
        return [str(item) for item in value]
    return list(value) if isinstance(value, tuple) else value
