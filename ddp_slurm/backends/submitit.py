"""submitit over uneven nodes: a Python function, or a command, on every rank of a heterogeneous job.

submitit's own executor asks for so many nodes with so many tasks each, its environment divides tasks by nodes, and its
watcher knows sacct only. Here the plan decides, each rank's place comes from the srun step, and the state comes from
what there is. Used as ``submitit.AutoExecutor(folder, cluster="het_slurm")`` or directly.
"""

import contextlib
import logging
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import DdpSlurmError

try:
    from submitit.core import core, utils
    from submitit.slurm.slurm import SlurmJobEnvironment
except ImportError as missing:
    raise DdpSlurmError(f"submitit is not installed here ({missing}); pip install 'ddp_slurm[submitit]'") from None

from ..cluster import Cluster
from ..hostlist import expand_hostlist
from ..job import Request, load_cluster, load_options
from ..logs import RankFilter, tail
from ..options import JobOptions, OptionsError
from ..plan import Plan, make_plan
from ..rank_env import RankEnv
from ..render import render_sbatch
from ..runs import RECORD, RUNS_FOLDER, Run, keep_run, load_run, make_runs_folder
from ..state import JobState, Patience, active_states, read_state, settle
from . import sbatch

NAME = "het_slurm"
SIGNAL_SECONDS = 90
"""submitit's own default: so long before the time limit the function's checkpoint is taken."""
WATCH_SECONDS = 4
"""At most so old is a job's state; one squeue asks for all jobs of this process."""
SETTLE_SECONDS = 15
"""How long a result file may come after the end of its job: network file systems cache what a folder holds."""

log = logging.getLogger("submitit")


class TasksOnNode(int):
    """The number of nodes, for code that divides by it: ``num_tasks // num_nodes`` is the tasks on *this* node.

    submitit's TorchDistributedEnvironment takes LOCAL_WORLD_SIZE from that division, which is right on even nodes only.
    """

    here: int

    def __new__(cls, nodes: int, here: int) -> "TasksOnNode":
        number = super().__new__(cls, nodes)
        number.here = here
        return number

    def __rfloordiv__(self, tasks: int) -> int:
        return self.here


class HetSlurmJobEnvironment(SlurmJobEnvironment):
    """The place of a rank inside a job of HetSlurmExecutor."""

    @classmethod
    def name(cls) -> str:
        return NAME

    @property
    def rank_env(self) -> RankEnv:
        """Rank, local rank, world size, local world size, node rank, master address and port."""
        # of the step, also when the function has exported the env:// set
        exported = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        return RankEnv.from_environ({k: v for k, v in os.environ.items() if k not in exported})

    @property
    def hostnames(self) -> list[str]:
        """All hosts in the order of node ranks: the first is rank 0's. Slurm's own list is sorted by name."""
        groups = range(int(os.environ.get("SLURM_HET_SIZE", 0)))
        lists = [os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in groups]
        return [host for text in lists or [os.environ["SLURM_STEP_NODELIST"]] for host in expand_hostlist(text)]

    @property
    def num_nodes(self) -> int:
        return TasksOnNode(len(self.hostnames), self.local_world_size)

    @property
    def local_world_size(self) -> int:
        return self.rank_env.local_world_size

    @property
    def master_addr(self) -> str:
        return self.rank_env.master_addr

    @property
    def master_port(self) -> int:
        return self.rank_env.master_port


class StateWatcher(core.InfoWatcher):
    """The states of all jobs of this process: one squeue for those that run, the other sources for those that ended."""

    def __init__(self, delay_s: int = WATCH_SECONDS) -> None:
        super().__init__(delay_s)
        self._states: dict[str, JobState] = {}
        self._runs: dict[str, Run | None] = {}
        self._patience: dict[str, Patience] = {}

    def watch(self, job_id: str, run: Run | None) -> None:
        self._runs[job_id] = run
        self.register_job(job_id)

    def update(self) -> None:
        """Raises StateError when Slurm has been silent about a job for too long."""
        waiting = [job_id for job_id in self._registered if job_id not in self._finished]
        if not waiting:
            return
        self._num_calls += 1
        active = active_states(waiting)
        for job_id in waiting:
            state = active.get(job_id) or self._ended(job_id)
            self._states[job_id] = state
            nodes = ",".join(component.nodes for component in state.components if component.nodes)
            self._info_dict[job_id] = {"JobID": job_id, "State": state.state, "NodeList": nodes}
            if state.is_final:
                self._finished.add(job_id)
        self._last_status_check = time.time()
        for job_id in waiting:
            self._patience.setdefault(job_id, Patience()).check(self._states[job_id])

    def _ended(self, job_id: str) -> JobState:
        run = self._runs.get(job_id)
        if run is None:
            return settle(read_state(job_id))
        state = settle(read_state(job_id, run.exit_marker, run.last_look))
        run.remember(state)
        return state

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        self.get_info(job_id, mode=mode)
        return job_id in self._states and self._states[job_id].is_final

    def state(self, job_id: str) -> JobState | None:
        """The job as it was seen last."""
        return self._states.get(job_id)

    def clear(self) -> None:
        super().clear()
        self._states.clear()


class HetSlurmJob(core.Job[core.R]):
    """A job over uneven nodes; ``results()`` are in the order of ranks, ``task(4)`` is rank 4."""

    _cancel_command = "scancel"
    _results_timeout_s = SETTLE_SECONDS
    watcher: StateWatcher = StateWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._world: tuple[int, ...] = self._tasks
        for sub_job in self._sub_jobs:
            assert isinstance(sub_job, HetSlurmJob)
            sub_job._world = self._tasks

    @property
    def run(self) -> Run | None:
        """The run folder: what was submitted, the log's path and the exit marker."""
        independent = utils.JobPaths.get_first_id_independent_folder(self._paths._folder)
        for folder in (independent / RUNS_FOLDER / self.job_id, self._paths.folder):
            if (folder / RECORD).exists():
                return load_run(folder)
        return None

    def _register_in_watcher(self) -> None:
        self.watcher.watch(self.job_id, self.run)

    def _result_file(self, rank: int) -> Path:
        return utils.JobPaths(self._paths._folder, self.job_id, rank).result_pickle

    def done(self, force_check: bool = False) -> bool:
        """Whether the job has ended. One rank's error is no end: the others go on, or the job is requeued."""
        with contextlib.suppress(OSError):
            self.paths.folder.chmod(self.paths.folder.stat().st_mode)  # makes a network file system look again
        if all(self._result_file(rank).exists() for rank in self._world):
            return True
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    def result(self) -> Any:
        """The function's result; of a job with several ranks the list of them."""
        results = self.results()
        return results if self._sub_jobs else results[0]

    def results(self) -> list[Any]:
        """Wait for the end and give the results of this job's ranks, in their order.

        Raises submitit's FailedJobError with the traceback of the rank that failed first, and its host; where ranks
        left no result UncompletedJobError, with the job's state and the end of its log.
        """
        self.wait()
        outcomes = self._outcomes()
        failure = self._failure(outcomes)
        if failure is not None:
            raise failure
        return [outcomes[rank][1] for rank in self._tasks]

    def exception(self) -> "utils.UncompletedJobError | None":
        """Wait for the end and give what ``results()`` would raise, None for nothing."""
        self.wait()
        return self._failure(self._outcomes())

    def _outcomes(self) -> dict[int, tuple[str, Any]]:
        """``("success", result)`` or ``("error", traceback)`` of each rank that left one."""
        state = self.watcher.state(self.job_id)
        late = self._results_timeout_s if state is None or state.state == "COMPLETED" else 1.0
        give_up = time.monotonic() + late
        outcomes: dict[int, tuple[str, Any]] = {}
        while True:
            for rank in self._tasks:
                if rank not in outcomes and (outcome := _load_outcome(self._result_file(rank))) is not None:
                    outcomes[rank] = outcome
            if len(outcomes) == len(self._tasks) or time.monotonic() > give_up:
                return outcomes
            time.sleep(0.2)

    def _failure(self, outcomes: dict[int, tuple[str, Any]]) -> "utils.UncompletedJobError | None":
        failed = [rank for rank, (outcome, _) in outcomes.items() if outcome == "error"]
        missing = [rank for rank in self._tasks if rank not in outcomes]
        if not failed and not missing:
            return None
        state = self.watcher.state(self.job_id)
        # where all results are there nobody has asked Slurm
        about = f"job {self.job_id}" + (f" is {state.describe()}" if state else "")
        path = self._log_path
        if failed:
            # the others' errors are often that this one went away
            first = min(failed, key=lambda rank: self._result_file(rank).stat().st_mtime_ns)
            others = f"; so did {_ranks(r for r in failed if r != first)}" if len(failed) > 1 else ""
            return utils.FailedJobError(
                f"{self._named(first)} failed{others}; {about}\n{outcomes[first][1].rstrip()}\nIts log is {path}"
            )
        cut_off = [rank for rank in missing if self._result_file(rank).exists()]
        left = f"{_ranks(missing)} left no result"
        left += f" (the file of {_ranks(cut_off)} is cut off)" if cut_off else ""
        end = tail(path)
        return utils.UncompletedJobError(
            f"{about}: {left}" + (f"\nThe end of {path}:\n{end}" if end else f"\nThere is no log {path}")
        )

    def _named(self, rank: int) -> str:
        run = self.run
        return f"rank {rank} on {run.plan['ranks'][rank]['node']}" if run else f"rank {rank}"

    @property
    def _log_path(self) -> Path:
        run = self.run
        return Path(run.log) if run and run.log else utils.JobPaths(self._paths._folder, self.job_id, 0).stdout

    def stdout(self) -> str | None:
        """What the job wrote, both streams; of one rank its own lines. None as long as there is no log."""
        return self._get_logs_string("stdout")

    def stderr(self) -> str | None:
        """None: both streams are in one log, in the order in which they came."""
        return None

    def _get_logs_string(self, name: str) -> str | None:
        path = self._log_path
        if name != "stdout" or not path.exists():
            return None
        text = path.read_text(errors="replace")
        if self._sub_jobs or len(self._world) == 1:
            return text
        rank = RankFilter(self._tasks[0])
        lines = (rank.text(line) for line in text.splitlines())
        return "".join(f"{line}\n" for line in lines if line is not None)


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _load_outcome(path: Path) -> tuple[str, Any] | None:
    """None for a file that is not there, or not whole yet."""
    try:
        outcome, value = utils.pickle_load(path)
    except (FileNotFoundError, EOFError, pickle.UnpicklingError):
        return None
    return outcome, value


class HetSlurmExecutor(core.PicklingExecutor):
    """Runs functions on every rank of a plan over uneven nodes.

    Args:
        folder: for pickles, scripts and logs; on a disk that all nodes share. May hold ``%j``, the job's id.
        cluster: a cluster.yaml or a Cluster; default ./cluster.yaml, else the live Slurm.
        job: a job.yaml; ``update_parameters`` takes its keys too, with ``_`` for ``-``, and wins.
        max_num_timeout: how often a function with a ``checkpoint`` is requeued at its time limit.
        plan: one made by ``make_plan``, in place of cluster, job and parameters.
        cluster_file: what to keep in the run folder where ``plan`` is given.
    """

    job_class = HetSlurmJob

    def __init__(
        self,
        folder: Path | str,
        cluster: Cluster | Path | str | None = None,
        job: Path | str | None = None,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        plan: Plan | None = None,
        cluster_file: Path | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout, max_pickle_size_gb)
        self._cluster, self._job, self._fixed_plan = cluster, job, plan
        self._cluster_file = cluster_file
        self.parameters["timeout_min"] = 0

    @classmethod
    def name(cls) -> str:
        return NAME

    @classmethod
    def affinity(cls) -> int:
        """There with a Slurm, and never chosen unasked: submitit's own executor serves even nodes."""
        return -1 if shutil.which("srun") is None else 0

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        return _from_generic(params)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Take keys of job.yaml, or submitit's words for the same. Raises OptionsError for others, and bad values."""
        if self._fixed_plan is not None:
            raise OptionsError("this executor was given a plan; make another plan for other parameters")
        known = set(JobOptions.model_fields) - {"command"}
        unknown = sorted(set(_from_generic(kwargs)) - known)
        if unknown:
            raise OptionsError(f"unknown parameters {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        given = {k: v for k, v in self.parameters.items() if k != "timeout_min"} | _from_generic(kwargs)
        options = self._options(given)
        self.parameters.update(given, timeout_min=minutes(options.time))  # in place: AutoExecutor shares the dict

    def _options(self, given: dict[str, Any]) -> JobOptions:
        values = {k: v for k, v in given.items() if not (k == "nodes" and isinstance(v, int))}
        return load_options(Request(None, Path(self._job) if self._job else None, values))

    def plan(self) -> Plan:
        """Who would run where, with the parameters as they are now. Raises DdpSlurmError."""
        if self._fixed_plan is not None:
            return self._fixed_plan
        options = self._options({k: v for k, v in self.parameters.items() if k != "timeout_min"})
        cluster = self._cluster
        if not isinstance(cluster, Cluster):
            cluster = load_cluster(Path(cluster) if cluster else None, local=False, gpus=None)
        nodes = self.parameters.get("nodes")
        if isinstance(nodes, int):
            with_gpus = tuple(node.name for node in cluster.nodes if node.gpu_count)
            if nodes > len(with_gpus):
                raise OptionsError(f"nodes={nodes}: the cluster has {len(with_gpus)} nodes with GPUs")
            options = options.model_copy(update={"nodes": with_gpus[:nodes]})
        return make_plan(cluster, options)

    def script(self) -> str:
        """The job script that ``submit`` would give to sbatch."""
        return render_sbatch(self._task_plan(self.plan()), self._runs)

    @property
    def _runs(self) -> Path:
        independent = utils.JobPaths.get_first_id_independent_folder(self.folder)
        return independent if independent.name == RUNS_FOLDER else independent / RUNS_FOLDER

    def _task_plan(self, plan: Plan) -> Plan:
        """The plan with submitit's own runner as the task."""
        options = plan.options
        named = options.python or options.conda_env or options.venv or options.container
        interpreter = "python" if named else sys.executable
        paths = utils.JobPaths(self.folder)
        output = options.output if "output" in options.model_fields_set else str(paths.stdout).replace("%t", "0")
        # what ranks left before they were requeued is not this run's result, and stops submitit's writer
        stale = shlex.quote(str(paths.result_pickle)).replace("%j", "'\"$SLURM_JOB_ID\"'").replace("%t", "'*'")
        changed = {
            "command": (interpreter, "-u", "-m", "submitit.core._submit", str(self.folder)),
            "output": output,
            "env": {**options.env, "SUBMITIT_EXECUTOR": NAME},
            "setup": (*options.setup, f"rm -f -- {stale} {stale}.save_tmp"),
            "signal_seconds": options.signal_seconds or SIGNAL_SECONDS,
            "max_restarts": options.max_restarts or self.max_num_timeout,
        }
        return replace(plan, options=options.model_copy(update=changed))

    def _internal_process_submissions(
        self, delayed_submissions: "Sequence[utils.DelayedSubmission]"
    ) -> "list[core.Job[Any]]":
        if len(delayed_submissions) > 1:
            log.info(f"{len(delayed_submissions)} jobs, each submitted by itself: Slurm refuses arrays of het jobs")
        return super()._internal_process_submissions(list(delayed_submissions))

    def _submit_command(self, command: str) -> "core.Job[Any]":
        plan = self.plan()
        task_plan = self._task_plan(plan)
        text = render_sbatch(task_plan, self._runs)
        make_runs_folder(self._runs)
        now = time.time()
        job_id = sbatch.submit(text)
        keep_run(
            task_plan, runs=self._runs, job_id=job_id, backend="submitit", script=text,
            cluster_file=self._file_of_cluster(), submitted_at=now, options=plan.options,
        )  # fmt: skip
        job: HetSlurmJob[Any] = self.job_class(self.folder, job_id, range(plan.world_size))
        job.paths.folder.mkdir(parents=True, exist_ok=True)
        job.paths.submission_file.write_text(text)
        return job

    def _file_of_cluster(self) -> Path | None:
        if self._fixed_plan is not None or isinstance(self._cluster, Cluster):
            return self._cluster_file
        path = Path(self._cluster or "cluster.yaml")
        return path if path.exists() else None

    # What follows belongs to the base class's own way of submitting, which _submit_command replaces.

    def _num_tasks(self) -> int:
        return self.plan().world_size

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return (string.decode() if isinstance(string, bytes) else string).strip().partition(";")[0]


def _from_generic(params: dict[str, Any]) -> dict[str, Any]:
    """submitit's own words for the parameters that all its executors share, as keys of job.yaml."""
    values = {k: v for k, v in params.items() if v is not None}
    for word in ("gpus_per_node", "tasks_per_node"):
        if word in values:
            raise OptionsError(
                f"{word}={values[word]!r}: the plan decides, a rank for each GPU of each node; for a part of the "
                "cluster use nodes or gpus"
            )
    if values.pop("stderr_to_stdout", True) is not True:
        raise OptionsError("stderr_to_stdout=False: the ranks' streams go to one log, labelled by rank")
    if "timeout_min" in values:
        values["time"] = str(values.pop("timeout_min"))
    if "mem_gb" in values:
        values["memory"] = f"{int(values.pop('mem_gb') * 1024)}M"
    if isinstance(values.get("time"), int):
        values["time"] = str(values["time"])
    if "env" in values:
        values["env"] = {name: str(value) for name, value in dict(values["env"]).items()}
    return values


def minutes(time_limit: str | None) -> int:
    """A time limit in Slurm's format as whole minutes, rounded up; 0 where there is none.

    >>> [minutes(text) for text in ("90", "1:30", "2:00:00", "1-12", "1-00:30")]
    [90, 2, 120, 2160, 1470]
    """
    if time_limit is None or not time_limit[0].isdigit():
        return 0
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return int(days or 0) * 1440 + -(-seconds // 60)


class RankCommand:
    """A command as the function of every rank: its result is the exit status 0, any other is an error."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    def __call__(self) -> int:
        # The command gets Slurm's signal itself and decides; submitit's handler would end this rank under it. A
        # handler, not SIG_IGN, which the command would inherit.
        signal.signal(SlurmJobEnvironment._usr_sig(), _leave_it_to_the_command)
        subprocess.run(self.command, check=True)
        return 0


def _leave_it_to_the_command(number: int, frame: FrameType | None) -> None:
    pass


class CommandJob:
    """``submit --backend submitit``: the planned command on every rank, submitit's files in the run folder."""

    def __init__(self, plan: Plan, runs: Path, cluster_file: Path | None) -> None:
        self._command = plan.options.task_command
        self._executor = HetSlurmExecutor(runs / "%j", plan=plan, cluster_file=cluster_file)

    @property
    def script(self) -> str:
        return self._executor.script()

    def submit(self) -> str:
        """The job's id. Raises DdpSlurmError."""
        return str(self._executor.submit(RankCommand(self._command)).job_id)
