"""submitit over uneven nodes: a Python function, or a command, on every rank of a job.

submitit's own executor asks for a number of nodes with the same number of tasks on each, its
environment divides tasks by nodes, and its watcher asks sacct only. Here the plan decides, the srun
step defines each rank's place, and the state comes from whatever source has it. Used as
``submitit.AutoExecutor(folder, cluster="het_slurm")`` or directly.

Every rank loads this module, as submitit loads all its plug-ins: imports that only the submitting
side needs are inside the functions.
"""

import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_slurm.backends.submitit.job import HetSlurmJob
from ddp_slurm.backends.submitit.rank import NAME, HetSlurmJobEnvironment, RankCommand, core, utils

if TYPE_CHECKING:
    from ddp_slurm.backends.submitit.plan import TaskJob
    from ddp_slurm.cluster import Cluster
    from ddp_slurm.plan import Plan

__all__ = ["CommandJob", "HetSlurmExecutor", "HetSlurmJob", "HetSlurmJobEnvironment"]

SIGNAL_SECONDS = 90
"""submitit's own default: the function's checkpoint is taken so long before the time limit."""

log = logging.getLogger("submitit")


class HetSlurmExecutor(core.PicklingExecutor):
    """Runs functions on every rank of a plan over uneven nodes.

    Args:
        folder: for pickles, scripts and logs, on a disk that all nodes share; may hold ``%j``, the
            job's id.
        cluster: a cluster.yaml or a Cluster; default ./cluster.yaml, else the live Slurm.
        job: a job.yaml; ``update_parameters`` takes its keys too, with ``_`` for ``-``, and wins.
        max_num_timeout: how often a job is restarted, whatever the reason, where the parameters and
            ``job`` have no ``max_restarts``.
        plan: one made by ``make_plan``, instead of cluster, job and parameters.
    """

    job_class = HetSlurmJob
    signal_seconds: int | None = SIGNAL_SECONDS
    """When the ranks get submitit's signal, where the options have none; None: never."""
    cluster_file: Path | None = None
    """What to keep in the run folder where ``plan`` was given."""

    def __init__(
        self,
        folder: Path | str,
        cluster: "Cluster | Path | str | None" = None,
        job: Path | str | None = None,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        plan: "Plan | None" = None,
    ) -> None:
        from ddp_slurm.backends.submitit import parameters

        of_slurm = parameters.given_for_slurm(sys._getframe(1))
        max_num_timeout = of_slurm.get("max_num_timeout", max_num_timeout)
        super().__init__(folder, max_num_timeout, max_pickle_size_gb)
        self._cluster = cluster
        self._job = Path(job) if job else None
        self._fixed_plan = plan
        self._default_restarts = max_num_timeout
        self.parameters["timeout_min"] = 0

    @classmethod
    def name(cls) -> str:
        return NAME

    @classmethod
    def affinity(cls) -> int:
        """Available with Slurm, never the default: submitit's own executor is for even nodes."""
        return -1 if shutil.which("srun") is None else 0

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """The generic ones of AutoExecutor under the ``slurm_`` ones. Raises OptionsError."""
        from ddp_slurm.backends.submitit import parameters

        of_slurm = parameters.from_slurm(parameters.given_for_slurm(sys._getframe(1)))
        return {**parameters.from_generic(params), **of_slurm}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Take keys of job.yaml, or submitit's names for the same. Raises OptionsError."""
        from ddp_slurm.backends.submitit import plan as submitit_plan
        from ddp_slurm.job.options import OptionsError

        if self._fixed_plan is not None:
            raise OptionsError(
                "this executor was given a plan; make another plan for other parameters"
            )
        merged = submitit_plan.merged_parameters(self.parameters, kwargs, self._job)
        self.parameters.update(merged)  # in place: AutoExecutor shares the dict

    def plan(self) -> "Plan":
        """Who would run where, with the current parameters. Raises DdpSlurmError."""
        from ddp_slurm.backends.submitit import plan as submitit_plan
        from ddp_slurm.plan import make_plan

        if self._fixed_plan is not None:
            return self._fixed_plan
        return make_plan(*submitit_plan.what_to_plan(self.parameters, self._cluster, self._job))

    def script(self) -> str:
        """The job script that ``submit`` would give to sbatch. Raises DdpSlurmError."""
        return self._task_job().script

    def _task_job(self) -> "TaskJob":
        from ddp_slurm.backends.submitit import plan as submitit_plan

        wanted = self._fixed_plan or submitit_plan.what_to_plan(
            self.parameters, self._cluster, self._job
        )
        return submitit_plan.make_task_job(
            wanted, self.folder, self._default_restarts, self.signal_seconds
        )

    def _internal_process_submissions(
        self, delayed_submissions: "Sequence[utils.DelayedSubmission]"
    ) -> "list[core.Job[Any]]":
        utils.JobPaths.get_first_id_independent_folder(self.folder).mkdir(
            parents=True, exist_ok=True
        )
        # submitit gives up after so many timeouts, and the job script after so many restarts.
        self.max_num_timeout = self._task_job().plan.options.max_restarts
        if len(delayed_submissions) > 1:
            log.info(
                f"{len(delayed_submissions)} jobs, submitted one by one: "
                "Slurm refuses arrays of heterogeneous jobs"
            )
        # The arguments of the functions may be secrets.
        self._umask = os.umask(0o077)
        try:
            return super()._internal_process_submissions(list(delayed_submissions))
        finally:
            os.umask(self._umask)

    def _submit_command(self, command: str) -> "core.Job[Any]":
        """Not submitit's own way, in which sbatch inherits a surrounding job's variables."""
        from ddp_slurm.backends.submitit import plan as submitit_plan
        from ddp_slurm.files import write_whole

        task_job = self._task_job()
        cluster_file = self.cluster_file
        if self._fixed_plan is None:
            cluster_file = submitit_plan.cluster_file_of(self._cluster)
        private = os.umask(self._umask)  # sbatch gives it to the job
        try:
            job_id = task_job.submit(cluster_file)
        finally:
            os.umask(private)
        ranks = range(task_job.plan.world_size)
        job: HetSlurmJob[Any] = self.job_class(self.folder, job_id, ranks)
        write_whole(job.paths.submission_file, task_job.script, 0o600)
        return job

    def _num_tasks(self) -> int:
        return self.plan().world_size

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string.decode() if isinstance(string, bytes) else string
        return text.strip().partition(";")[0]


class CommandJob:
    """``submit --backend submitit``: the planned command on every rank.

    submitit's files are in the run folder.
    """

    def __init__(self, plan: "Plan", runs: Path, cluster_file: Path | None) -> None:
        self._command = plan.options.task_command
        self._executor = HetSlurmExecutor(runs / "%j", plan=plan, max_num_timeout=0)
        self._executor.cluster_file = cluster_file
        self._executor.signal_seconds = None

    @property
    def script(self) -> str:
        return self._executor.script()

    def submit(self) -> str:
        """The job's id. Raises DdpSlurmError."""
        return str(self._executor.submit(RankCommand(self._command)).job_id)
