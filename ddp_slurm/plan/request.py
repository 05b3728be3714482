"""From what was typed to a plan; the errors of all files and options come in one report."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_slurm.cluster import Cluster, ClusterError
from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.checks import combination_errors
from ddp_slurm.job.log_path import with_log_path
from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.plan.shrink import shrink
from ddp_slurm.schema.schema import Invalid, error_text, keys_of
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
    shrink: bool = False
    """Leave out the nodes that Slurm cannot use now."""
    errors: tuple[str, ...] = ()
    """What is wrong with the command line itself, such as an unknown option."""

    @property
    def cluster_file(self) -> Path | None:
        """The file that was named, else ./cluster.yaml, where it exists."""
        if self.cluster is not None:
            return self.cluster
        return DEFAULT_CLUSTER if DEFAULT_CLUSTER.exists() else None


@dataclass
class Reading:
    """A request that was looked at: what could be read, and the errors of the rest."""

    cluster: Cluster | None = None
    options: JobOptions = field(default_factory=JobOptions)
    unread: frozenset[str] = frozenset()
    """Keys of JobOptions whose values could not be read."""
    errors: list[str] = field(default_factory=list)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep a DdpSlurmError of the ``with`` block to be reported with the others."""
        try:
            yield
        except DdpSlurmError as error:
            self.errors.append(str(error))

    def plan(self) -> Plan:
        """Raises DdpSlurmError with all errors, those of the plan included."""
        plan = None
        if self.cluster is not None:
            with self.collected():
                plan = make_plan(self.cluster, self.options)
        if self.errors or plan is None:
            raise DdpSlurmError("\n".join(self.errors))
        return plan


def plan_request(request: Request) -> Plan:
    """The plan of a request. Raises one DdpSlurmError with the errors of all files and options."""
    return read_request(request).plan()


def read_request(request: Request) -> Reading:
    """Read the job's options and the cluster, and settle where the log is."""
    reading = _read_options(request)
    with reading.collected():
        reading.cluster = _cluster_of(request, reading.options)
    # Without ``output`` the log of a run in the terminal is in its run folder.
    if request.backend in ("sbatch", "submitit") or "output" in reading.options.given:
        cluster_name = reading.cluster.name if reading.cluster else ""
        with reading.collected():
            reading.options = with_log_path(reading.options, reading.options.name or cluster_name)
    if request.shrink:
        _shrink(reading, request.backend)
    return reading


def load_options(request: Request) -> JobOptions:
    """job.yaml's keys under the command line's options.

    Raises OptionsError with all errors of both, and of options that cannot be combined.
    """
    reading = _read_options(request)
    if reading.errors:
        raise OptionsError("\n".join(reading.errors))
    return reading.options


def load_cluster(path: Path | None, *, local: bool = False, gpus: int | None = None) -> Cluster:
    """The file that was named, else ./cluster.yaml, else the live Slurm.

    Args:
        local: without a file, this machine in place of the live Slurm.
        gpus: the number of ranks on a machine without GPUs.
    """
    if path is not None or DEFAULT_CLUSTER.exists():
        return Cluster.load(path or DEFAULT_CLUSTER)
    if local:
        from ddp_slurm.cluster.this_machine import this_machine

        return this_machine(gpus)
    from ddp_slurm.cluster.discover import discover

    say("no cluster.yaml here; asking the live Slurm")
    return discover()


def _cluster_of(request: Request, options: JobOptions) -> Cluster:
    if request.backend == "torchrun" and request.cluster_file is None:
        raise ClusterError(
            "--backend torchrun needs a cluster.yaml with the machines, here or by --cluster FILE"
        )
    local = request.backend == "local"
    return load_cluster(request.cluster_file, local=local, gpus=options.gpus)


def _shrink(reading: Reading, backend: str) -> None:
    if backend in ("local", "torchrun"):
        reading.errors.append(
            "--shrink asks Slurm which nodes it can use; it cannot be combined with "
            f"--backend {backend}"
        )
    if any(item.component is not None for item in reading.options.sbatch):
        reading.errors.append(
            "--shrink may change the components; it cannot be combined with "
            "--sbatch COMPONENT:KEY=VALUE"
        )
    if reading.errors or reading.cluster is None:
        return
    with reading.collected():
        reading.options = shrink(reading.cluster, reading.options)


def _read_options(request: Request) -> Reading:
    file = _read_job_file(request.job)
    values = {name.replace("_", "-"): value for name, value in request.options.items()}
    typed, unread_typed, typed_errors = _readable(values)
    options = file.options.merged_with(typed)
    unread = (file.unread - typed.given) | unread_typed
    errors = [*request.errors, *file.errors, *(f"--{error}" for error in typed_errors)]
    errors += combination_errors(options, unread)
    return Reading(None, options, unread, errors)


def _read_job_file(path: Path | None) -> Reading:
    if path is None:
        return Reading()
    try:
        file = load_yaml(path, OptionsError)
    except OptionsError as error:
        return Reading(unread=frozenset(keys_of(JobOptions)), errors=[str(error)])
    try:
        return Reading(options=validate(JobOptions.read, file, OptionsError))
    except OptionsError as error:
        options, unread, _ = _readable(file.data if isinstance(file.data, dict) else {})
        return Reading(None, options, unread, [str(error)])


def _readable(values: Mapping[str, Any]) -> tuple[JobOptions, frozenset[str], list[str]]:
    """The options of those values that can be read, the keys of the others, and their errors."""
    try:
        return JobOptions(**values), frozenset(), []
    except Invalid as invalid:
        unread = frozenset(str(path[0]).replace("-", "_") for path, _ in invalid.errors)
        errors = [error_text(*error) for error in invalid.errors]
    rest = {name: v for name, v in values.items() if name.replace("-", "_") not in unread}
    return JobOptions(**rest), unread, errors
