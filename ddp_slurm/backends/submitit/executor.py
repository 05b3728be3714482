"""submitit over uneven nodes: a Python function, or a command, on every rank of a heterogeneous job.

submitit's own executor asks for so many nodes with so many tasks each, its environment divides tasks by nodes, and its
watcher knows sacct only. Here the plan decides, each rank's place comes from the srun step, and the state comes from
what there is. Used as ``submitit.AutoExecutor(folder, cluster="het_slurm")`` or directly.

Every rank loads this module, as submitit loads all its plug-ins: what only submits is imported where it is used.
"""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_slurm.backends.submitit.job import HetSlurmJob
from ddp_slurm.backends.submitit.rank import NAME, HetSlurmJobEnvironment, RankCommand, core, utils

if TYPE_CHECKING:
    from ddp_slurm.cluster import Cluster
    from ddp_slurm.plan import Plan

__all__ = ["CommandJob", "HetSlurmExecutor", "HetSlurmJob", "HetSlurmJobEnvironment"]

SIGNAL_SECONDS = 90
"""submitit's own default: so long before the time limit the function's checkpoint is taken."""

log = logging.getLogger("submitit")


class HetSlurmExecutor(core.PicklingExecutor):
    """Runs functions on every rank of a plan over uneven nodes.

    Args:
        folder: for pickles, scripts and logs; on a disk that all nodes share. May hold ``%j``, the job's id.
        cluster: a cluster.yaml or a Cluster; default ./cluster.yaml, else the live Slurm.
        job: a job.yaml; ``update_parameters`` takes its keys too, with ``_`` for ``-``, and wins.
        max_num_timeout: how often a function with a ``checkpoint`` is requeued at its time limit.
        plan: one made by ``make_plan``, in place of cluster, job and parameters.
        cluster_file: what to keep in the run folder where ``plan`` is given.
        signal_seconds: when the ranks get submitit's signal, where the options do not say; None for never.
    """

    job_class = HetSlurmJob

    def __init__(
        self,
        folder: Path | str,
        cluster: "Cluster | Path | str | None" = None,
        job: Path | str | None = None,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        plan: "Plan | None" = None,
        cluster_file: Path | None = None,
        signal_seconds: int | None = SIGNAL_SECONDS,
    ) -> None:
        super().__init__(folder, max_num_timeout, max_pickle_size_gb)
        self._cluster, self._job, self._fixed_plan = cluster, Path(job) if job else None, plan
        self._cluster_file, self._signal_seconds = cluster_file, signal_seconds
        self.parameters["timeout_min"] = 0

    @classmethod
    def name(cls) -> str:
        return NAME

    @classmethod
    def affinity(cls) -> int:
        """There with a Slurm, and never chosen unasked: submitit's own executor serves even nodes."""
        return -1 if shutil.which("srun") is None else 0

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        return params  # submitit's own words are understood by _internal_update_parameters

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Take keys of job.yaml, or submitit's words for the same. Raises OptionsError for others, and bad values."""
        from ddp_slurm.backends.submitit import plan as submitit_plan

        if self._fixed_plan is not None:
            raise submitit_plan.OptionsError(
                "this executor was given a plan; make another plan for other parameters"
            )
        # in place: AutoExecutor shares the dict
        self.parameters.update(submitit_plan.merged_parameters(self.parameters, kwargs, self._job))

    def plan(self) -> "Plan":
        """Who would run where, with the parameters as they are now. Raises DdpSlurmError."""
        from ddp_slurm.backends.submitit import plan as submitit_plan

        return self._fixed_plan or submitit_plan.plan_of(self.parameters, self._cluster, self._job)

    def script(self) -> str:
        """The job script that ``submit`` would give to sbatch."""
        from ddp_slurm.backends.submitit import plan as submitit_plan

        return submitit_plan.script_of(
            self.plan(), self.folder, self.max_num_timeout, self._signal_seconds
        )

    def _internal_process_submissions(
        self, delayed_submissions: "Sequence[utils.DelayedSubmission]"
    ) -> "list[core.Job[Any]]":
        if len(delayed_submissions) > 1:
            log.info(
                f"{len(delayed_submissions)} jobs, each submitted by itself: Slurm refuses arrays of het jobs"
            )
        return super()._internal_process_submissions(list(delayed_submissions))

    def _submit_command(self, command: str) -> "core.Job[Any]":
        """In place of submitit's own way, which lets sbatch inherit the variables of a surrounding job."""
        from ddp_slurm.backends.submitit import plan as submitit_plan

        plan = self.plan()
        text = submitit_plan.script_of(
            plan, self.folder, self.max_num_timeout, self._signal_seconds
        )
        job_id = submitit_plan.submit(plan, text, self.folder, self._cluster, self._cluster_file)
        job: HetSlurmJob[Any] = self.job_class(self.folder, job_id, range(plan.world_size))
        job.paths.folder.mkdir(parents=True, exist_ok=True)
        job.paths.submission_file.write_text(text)
        return job

    def _num_tasks(self) -> int:
        return self.plan().world_size

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return (string.decode() if isinstance(string, bytes) else string).strip().partition(";")[0]


class CommandJob:
    """``submit --backend submitit``: the planned command on every rank, submitit's files in the run folder."""

    def __init__(self, plan: "Plan", runs: Path, cluster_file: Path | None) -> None:
        self._command = plan.options.task_command
        self._executor = HetSlurmExecutor(
            runs / "%j",
            plan=plan,
            cluster_file=cluster_file,
            max_num_timeout=0,
            signal_seconds=None,
        )

    @property
    def script(self) -> str:
        return self._executor.script()

    def submit(self) -> str:
        """The job's id. Raises DdpSlurmError."""
        return str(self._executor.submit(RankCommand(self._command)).job_id)
