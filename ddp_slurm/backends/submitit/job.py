"""Jobs of HetSlurmExecutor on the submitting side: state without accounting, results by rank."""

import contextlib
import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_slurm.backends.submitit.rank import SlurmJobEnvironment, core, utils
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.runs.log import RankFilter, tail
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.slurm_client.sources import active_states, read_state, settle
from ddp_slurm.slurm_client.states import JobState, Patience
from ddp_slurm.trust import TrustError, is_ours
from ddp_slurm.user import name_of

if TYPE_CHECKING:  # every rank loads this module with submitit's plug-ins, without needing it
    from ddp_slurm.runs.run_folder import Run

WATCH_SECONDS = 4
"""The age at which a job's state is read again; one squeue asks for all jobs of this process."""
SETTLE_SECONDS = 15
"""How late a result file may appear after its job's end: network file systems cache folders."""
SETTLE_AFTER_FAILURE_SECONDS = 1.0

Outcome = tuple[str, Any]
"""``("success", result)`` or ``("error", traceback)``."""


class StateWatcher(core.InfoWatcher):
    """The states of all jobs of this process: one squeue for those that run."""

    def __init__(self, delay_s: int = WATCH_SECONDS) -> None:
        super().__init__(delay_s)
        self._states: dict[str, JobState] = {}
        self._runs: dict[str, Run | None] = {}
        self._patience: dict[str, Patience] = {}

    def watch(self, job_id: str, run: "Run | None") -> None:
        """Follow a job, as a new one: Slurm gives an id again, and so does another cluster."""
        self._finished.discard(job_id)
        for known in (self._states, self._patience, self._info_dict):
            known.pop(job_id, None)
        self._runs[job_id] = run
        self.register_job(job_id)

    def update(self) -> None:
        """Raises StateError when no source has answered about a job for too long."""
        waiting = [job_id for job_id in self._registered if job_id not in self._finished]
        if not waiting:
            return
        self._num_calls += 1
        active = active_states(waiting)
        for job_id in waiting:
            self._keep(job_id, active.get(job_id) or self._ended(job_id))
        self._last_status_check = time.time()
        for job_id in waiting:
            self._patience.setdefault(job_id, Patience()).check(self._states[job_id])

    def _keep(self, job_id: str, state: JobState) -> None:
        self._states[job_id] = state
        nodes = ",".join(component.nodes for component in state.components if component.nodes)
        self._info_dict[job_id] = {"JobID": job_id, "State": state.state, "NodeList": nodes}
        if state.is_final:
            self._finished.add(job_id)

    def _ended(self, job_id: str) -> JobState:
        run = self._runs.get(job_id)
        state = settle(read_state(job_id, run), run)
        if run is not None:
            run.remember(state)
        return state

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        self.get_info(job_id, mode=mode)
        return job_id in self._states and self._states[job_id].is_final

    def state(self, job_id: str) -> JobState | None:
        """The job's state as it was read last."""
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
    def run(self) -> "Run | None":
        """The run folder: what was submitted, the log's path and the exit marker."""
        from ddp_slurm.job.runs_folder import names_of_runs_folder
        from ddp_slurm.runs.run_folder import RECORD, load_run

        fixed = utils.JobPaths.get_first_id_independent_folder(self._paths._folder)
        kept = [fixed / name / self.job_id for name in names_of_runs_folder()]
        for folder in (*kept, self._paths.folder):
            if (folder / RECORD).exists():
                return load_run(folder)
        return None

    def _register_in_watcher(self) -> None:
        self.watcher.watch(self.job_id, self.run)

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the ranks the signal for a checkpoint, as submitit's page on checkpointing does.

        Args:
            timeout: as before the time limit; otherwise as in a preemption, with SIGTERM first.

        Raises DdpSlurmError where Slurm refuses.
        """
        checkpoint = SlurmJobEnvironment._usr_sig().name.removeprefix("SIG")
        for name in (checkpoint,) if timeout else ("TERM", checkpoint):
            answer = ask_slurm(["scancel", f"--signal={name}", self.job_id])
            if answer.status:
                raise DdpSlurmError(f"job {self.job_id} got no signal {name}: {answer.text}")

    def _result_file(self, rank: int) -> Path:
        return utils.JobPaths(self._paths._folder, self.job_id, rank).result_pickle

    def done(self, force_check: bool = False) -> bool:
        """Whether the job has ended.

        One rank's error is not the end: the others go on, or the job is requeued.
        """
        with contextlib.suppress(OSError):  # makes a network file system read the folder again
            self.paths.folder.chmod(self.paths.folder.stat().st_mode)
        if self._all_succeeded():
            return True
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    def _all_succeeded(self) -> bool:
        files = [self._result_file(rank) for rank in self._world]
        if not all(file.exists() for file in files):
            return False
        outcomes = map(_load_outcome, files)
        return all(outcome is not None and outcome[0] == "success" for outcome in outcomes)

    def result(self) -> Any:
        """The function's result; of a job with several ranks the list of them."""
        results = self.results()
        return results if self._sub_jobs else results[0]

    def results(self) -> list[Any]:
        """Wait for the end and return the results of this job's ranks, in their order.

        Raises submitit's FailedJobError with the traceback of the rank that failed first, and its
        host; where ranks left no result UncompletedJobError, with the job's state and the end of
        its log.
        """
        self.wait()
        outcomes = self._outcomes()
        failure = self._failure(outcomes)
        if failure is not None:
            raise failure
        return [outcomes[rank][1] for rank in self._tasks]

    def exception(self) -> "utils.UncompletedJobError | None":
        """Wait for the end and return what ``results()`` would raise, None for nothing."""
        self.wait()
        return self._failure(self._outcomes())

    def _outcomes(self) -> dict[int, Outcome]:
        """The outcome of each rank that left one."""
        state = self.watcher.state(self.job_id)
        has_failed = state is not None and state.state != "COMPLETED"
        wait_seconds = SETTLE_AFTER_FAILURE_SECONDS if has_failed else self._results_timeout_s
        give_up = time.monotonic() + wait_seconds
        outcomes: dict[int, Outcome] = {}
        while True:
            for rank in self._tasks:
                outcome = None if rank in outcomes else _load_outcome(self._result_file(rank))
                if outcome is not None:
                    outcomes[rank] = outcome
            if len(outcomes) == len(self._tasks) or time.monotonic() > give_up:
                return outcomes
            time.sleep(0.2)

    def _failure(self, outcomes: Mapping[int, Outcome]) -> "utils.UncompletedJobError | None":
        failed = [rank for rank, (outcome, _) in outcomes.items() if outcome == "error"]
        missing = [rank for rank in self._tasks if rank not in outcomes]
        if failed:
            return self._failed(failed, outcomes)
        return self._uncompleted(missing) if missing else None

    def _failed(
        self, failed: Sequence[int], outcomes: Mapping[int, Outcome]
    ) -> "utils.FailedJobError":
        # The others' errors are often that the first one is gone.
        first = min(failed, key=lambda rank: self._result_file(rank).stat().st_mtime_ns)
        others = [rank for rank in failed if rank != first]
        also = f"; so did {_ranks(others)}" if others else ""
        traceback = outcomes[first][1].rstrip()
        return utils.FailedJobError(
            f"{self._named(first)} failed{also}; {self._described()}\n{traceback}\n"
            f"Its log is {self._log_path}"
        )

    def _uncompleted(self, missing: Sequence[int]) -> "utils.UncompletedJobError":
        cut_off = [rank for rank in missing if self._result_file(rank).exists()]
        left = f"{_ranks(missing)} left no result"
        if cut_off:
            left += f" (the file of {_ranks(cut_off)} is cut off)"
        end = tail(self._log_path)
        log = f"The end of {self._log_path}:\n{end}" if end else f"There is no log {self._log_path}"
        return utils.UncompletedJobError(f"{self._described()}: {left}\n{log}")

    def _described(self) -> str:
        state = self.watcher.state(self.job_id)  # None where all results exist: Slurm was not asked
        return f"job {self.job_id}" + (f" is {state.describe()}" if state else "")

    def _named(self, rank: int) -> str:
        run = self.run
        return f"rank {rank} on {run.plan['ranks'][rank]['node']}" if run else f"rank {rank}"

    @property
    def _log_path(self) -> Path:
        run = self.run
        if run and run.log:
            return Path(run.log)
        return utils.JobPaths(self._paths._folder, self.job_id, 0).stdout

    def stdout(self) -> str | None:
        """What the job wrote, both streams; of one rank its own lines. None without a log."""
        return self._get_logs_string("stdout")

    def stderr(self) -> str | None:
        """None: both streams are in one log, in the order in which they came."""
        return None

    def _get_logs_string(self, name: str) -> str | None:
        path = self._log_path
        if name != "stdout" or not path.exists():
            return None
        text = path.read_bytes().decode(errors="replace")
        if self._sub_jobs or len(self._world) == 1:
            return text
        rank = RankFilter(self._tasks[0])
        # Not splitlines: what follows a progress bar's \r has no label.
        lines = (rank.text(line) for line in text.removesuffix("\n").split("\n"))
        return "".join(f"{line}\n" for line in lines if line is not None)


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    noun = "ranks" if len(numbers) > 1 else "rank"
    return f"{noun} {', '.join(map(str, numbers))}"


def _load_outcome(path: Path) -> Outcome | None:
    """None for a file that does not exist, or is not complete yet.

    Raises TrustError for another user's file: to load it can run any code.
    """
    try:
        with path.open("rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            if not is_ours(owner):
                raise TrustError(f"{path}: belongs to another user, {name_of(owner)}")
            # Not by its path: another file may be there by now.
            outcome, value = utils.pickle_load(f"/proc/self/fd/{file.fileno()}")
    except (FileNotFoundError, EOFError, pickle.UnpicklingError):
        return None
    return outcome, value
