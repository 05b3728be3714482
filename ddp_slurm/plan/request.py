"""From what was typed to a plan: cluster.yaml, job.yaml and the command line, all their faults reported together."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_slurm.cluster import Cluster
from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.log_path import with_log_path
from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.schema.schema import Invalid, error_text
from ddp_slurm.schema.yaml_file import load_yaml, validate

DEFAULT_CLUSTER = Path("cluster.yaml")


@dataclass(frozen=True)
class Request:
    """What was typed, before it is looked at."""

    cluster: Path | None
    job: Path | None
    options: Mapping[str, Any]
    """JobOptions' fields as texts or lists of texts; only those that were given."""
    backend: str = "sbatch"
    """The one that will start the job."""


def load_options(request: Request) -> JobOptions:
    """job.yaml's keys under the command line's options. Raises OptionsError with all faults of both."""
    faults = []
    options, typed = JobOptions(), JobOptions()
    try:
        if request.job is not None:
            options = validate(JobOptions.read, load_yaml(request.job, OptionsError), OptionsError)
    except OptionsError as fault:
        faults.append(str(fault))
    try:
        typed = JobOptions(
            **{name.replace("_", "-"): value for name, value in request.options.items()}
        )
    except Invalid as invalid:
        faults += [f"--{error_text(*fault)}" for fault in invalid.errors]
    if faults:
        raise OptionsError("\n".join(faults))
    options = options.merged_with(typed)
    options.check_together()
    return options


def load_cluster(path: Path | None, *, local: bool, gpus: int | None) -> Cluster:
    """The file that was named, else ./cluster.yaml, else the live Slurm; for local runs else this machine."""
    if path is not None or DEFAULT_CLUSTER.exists():
        return Cluster.load(path or DEFAULT_CLUSTER)
    if local:
        from ddp_slurm.cluster.this_machine import this_machine

        return this_machine(gpus)
    from ddp_slurm.cluster.discover import discover

    say("no cluster.yaml here; asking the live Slurm")
    return discover()


def plan_request(request: Request) -> Plan:
    """The plan of a request. Raises one DdpSlurmError with the faults of the cluster's file and of the options."""
    local = request.backend == "local"
    faults = []
    options, cluster = None, None
    try:
        options = load_options(request)
    except DdpSlurmError as fault:
        faults.append(str(fault))
    try:
        cluster = load_cluster(request.cluster, local=local, gpus=options.gpus if options else None)
    except DdpSlurmError as fault:
        faults.append(str(fault))
    if options is not None and _has_a_log_path(request, options):
        name = options.name or (cluster.name if cluster else "")
        try:
            options = with_log_path(options, name)
        except DdpSlurmError as fault:
            faults.append(str(fault))
    if options is None or cluster is None or faults:
        raise DdpSlurmError("\n".join(faults))
    return make_plan(cluster, options)


def _has_a_log_path(request: Request, options: JobOptions) -> bool:
    """Without ``output`` the log of a run in the terminal is in its run folder."""
    return "output" in options.given or request.backend not in ("local", "torchrun")
