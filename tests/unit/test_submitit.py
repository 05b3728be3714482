"""submitit over uneven nodes, without Slurm: what is submitted, what ranks see, what arrives."""

import inspect
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

submitit = pytest.importorskip("submitit")

from submitit.auto import auto  # noqa: E402
from submitit.core import core, job_environment, plugins, submission, utils  # noqa: E402
from submitit.slurm import slurm  # noqa: E402

from ddp_slurm.ask import Answer  # noqa: E402
from ddp_slurm.backends import sbatch  # noqa: E402
from ddp_slurm.backends.submitit import HetSlurmExecutor, HetSlurmJob  # noqa: E402
from ddp_slurm.backends.submitit import job as submitit_job  # noqa: E402
from ddp_slurm.backends.submitit import plan as submitit_plan  # noqa: E402
from ddp_slurm.backends.submitit.executor import HetSlurmJobEnvironment  # noqa: E402
from ddp_slurm.backends.submitit.plan import minutes  # noqa: E402
from ddp_slurm.errors import DdpSlurmError  # noqa: E402
from ddp_slurm.job.options import OptionsError  # noqa: E402
from ddp_slurm.slurm_client.states import ComponentState, JobState  # noqa: E402


def test_the_parts_of_submitit_that_are_used_are_as_they_were() -> None:
    """A new release may change them silently: read its changes before you widen the range."""
    assert metadata.version("submitit").startswith("1.5.")

    def parameters(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert parameters(core.PicklingExecutor.__init__) == [
        "self",
        "folder",
        "max_num_timeout",
        "max_pickle_size_gb",
    ]
    assert parameters(core.PicklingExecutor._internal_process_submissions) == [
        "self",
        "delayed_submissions",
    ]
    assert parameters(core.PicklingExecutor._submit_command) == ["self", "command"]
    assert core.PicklingExecutor.__abstractmethods__ == {
        "_num_tasks",
        "_make_submission_file_text",
        "_make_submission_command",
        "_get_job_id_from_submission_command",
    }
    # their local ``kwargs`` hold what a script gave
    assert parameters(auto.AutoExecutor._internal_update_parameters) == ["self", "kwargs"]
    assert parameters(auto.flexible_init) == ["cls", "folder", "kwargs"]
    assert parameters(core.Job.__init__) == ["self", "folder", "job_id", "tasks"]
    assert parameters(core.InfoWatcher.get_info) == ["self", "job_id", "mode"]
    assert parameters(core.InfoWatcher.update_if_long_enough) == ["self", "mode"]
    assert parameters(job_environment.JobEnvironment._handle_signals) == [
        "self",
        "paths",
        "submission",
    ]
    assert parameters(utils.JobPaths.__init__) == ["self", "folder", "job_id", "task_id"]
    for owner, names in {
        core.InfoWatcher: ("register_job", "clear"),
        core.Job: (
            "_register_in_watcher",
            "_get_logs_string",
            "_cancel_command",
            "wait",
            "done",
            "results",
            "exception",
        ),
        slurm.SlurmJobEnvironment: (
            "_requeue",
            "_usr_sig",
            "hostnames",
            "num_tasks",
            "num_nodes",
            "global_rank",
        ),
        utils: ("FailedJobError", "UncompletedJobError", "pickle_load", "temporary_save_path"),
        utils.JobPaths: (
            "get_first_id_independent_folder",
            "result_pickle",
            "submission_file",
            "stdout",
        ),
        submission: ("process_job",),
    }.items():
        assert [name for name in names if not hasattr(owner, name)] == []


def test_submitit_finds_both_plug_ins() -> None:
    assert plugins.get_executors()["het_slurm"] is HetSlurmExecutor
    assert isinstance(plugins.get_job_environments()["het_slurm"], HetSlurmJobEnvironment)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scripts that were given to sbatch; ids count from 48."""
    scripts: list[str] = []

    def submit(script: str) -> str:
        scripts.append(script)
        return str(47 + len(scripts))

    monkeypatch.setattr(sbatch, "submit", submit)
    return scripts


@pytest.fixture(autouse=True)
def _watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher of the test's own, and a Slurm in which every job runs."""
    fresh = submitit_job.StateWatcher(delay_s=0)
    monkeypatch.setattr(HetSlurmJob, "watcher", fresh)
    monkeypatch.setattr(submitit_job, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(HetSlurmJob, "_results_timeout_s", 0)
    monkeypatch.setattr(
        submitit_job,
        "active_states",
        lambda ids: {i: JobState(i, "RUNNING", "squeue") for i in ids},
    )


def ends(monkeypatch: pytest.MonkeyPatch, state: str, status: int | None = None) -> None:
    """From now on squeue is empty and another source tells the state."""
    component = ComponentState("48+0", state, "gamma", "", status)
    monkeypatch.setattr(submitit_job, "active_states", lambda ids: {})
    monkeypatch.setattr(
        submitit_job, "read_state", lambda i, *a: JobState(i, state, "scontrol", (component,))
    )
    HetSlurmJob.watcher.clear()


@pytest.fixture
def job(uneven: Path, hostile_folder: Path, submitted: list[str]) -> HetSlurmJob[Any]:
    """A job of seven ranks in a folder with a hostile name."""
    executor = HetSlurmExecutor(hostile_folder / "%j", uneven)
    executor.update_parameters(time="10")
    return executor.submit(len, "1234567")  # type: ignore[return-value]


def leave(job: HetSlurmJob[Any], results: dict[int, tuple[str, Any]]) -> None:
    for rank, outcome in results.items():
        job.task(rank).paths.result_pickle.write_bytes(pickle.dumps(outcome))


def test_a_percent_sign_in_the_folder_is_no_pattern(uneven: Path, tmp_path: Path) -> None:
    script = HetSlurmExecutor(tmp_path / "50%z/%j", uneven).script()
    assert f"#SBATCH --output={tmp_path}/50%%z/%j/%j_0_log.out\n" in script


def test_the_script(
    job: HetSlurmJob[Any], submitted: list[str], hostile_folder: Path, tmp_path: Path
) -> None:
    (script,) = submitted
    assert job.job_id == "48"
    assert job.num_tasks == 7
    assert job.paths.submission_file.read_text() == script
    assert job.submission().result() == 7
    for line in (
        "export SUBMITIT_EXECUTOR=het_slurm\n",
        "#SBATCH --requeue\n",
        "#SBATCH --signal=USR2@90\n",
        "srun --label --kill-on-bad-exit=1 --wait=0",
    ):
        assert line in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    # The results of an earlier start are removed, of this job only; the task is submitit's runner.
    record = '[[ "$*" == *--overlap* || $1 == --version ]] || printf "%s\\n" "$@" > "$RECORD"'
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{record}\n")
    (tmp_path / "srun").chmod(0o755)
    folder = hostile_folder / "48"
    for name in (
        "48_0_result.pkl",
        "48_4_result.pkl",
        "48_4_result.pkl.save_tmp",
        "49_0_result.pkl",
    ):
        (folder / name).touch()
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "48",
        "SLURM_HET_SIZE": "3",
        "RECORD": str(tmp_path / "words"),
    }
    done = subprocess.run(["bash"], input=script, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.glob("*result*")) == ["49_0_result.pkl"]
    words = (tmp_path / "words").read_text()
    assert (
        words.count(f"{sys.executable}\n-u\n-m\nsubmitit.core._submit\n{hostile_folder / '%j'}\n")
        == 3
    )


def test_a_job_that_has_ended_well_does_not_start_again(
    job: HetSlurmJob[Any], submitted: list[str], hostile_folder: Path, tmp_path: Path
) -> None:
    """Slurm 24.11 requeues a job once more that was preempted, requeued itself, and ended."""
    (script,) = submitted
    stubs = {
        "srun": '[[ "$*" == *--overlap* || $1 == --version ]] || echo start >>"$STARTS"',
        "squeue": '[[ "$*" == *--steps* ]] || echo "48 RUNNING 1 N/A"',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "48",
        "SLURM_HET_SIZE": "3",
        "STARTS": str(tmp_path / "starts"),
    }
    result = hostile_folder / "48" / "48_0_result.pkl"
    for restarts in ("1", "2"):
        environ = {**env, "SLURM_RESTART_COUNT": restarts}
        done = subprocess.run(["bash"], input=script, env=environ, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        result.touch()
    assert (tmp_path / "starts").read_text() == "start\n"
    assert result.exists()
    assert "the job has ended well before this restart" in done.stderr


def test_results_by_rank(job: HetSlurmJob[Any]) -> None:
    assert not job.done()
    leave(job, {rank: ("success", rank * rank) for rank in range(6)})
    assert not job.done()
    leave(job, {6: ("success", 36)})
    assert job.done()
    assert job.results() == [0, 1, 4, 9, 16, 25, 36] == job.result()
    assert job.task(3).result() == 9
    assert job.exception() is None


def test_a_progress_bar_stays_with_its_rank(job: HetSlurmJob[Any]) -> None:
    job.paths.stdout.write_bytes(b"5: 10%\r20%\n6: 30%\r40%\n")
    assert job.task(6).stdout() == "30%\r40%\n"
    assert job.stdout() == "5: 10%\r20%\n6: 30%\r40%\n"


def test_the_first_ranks_error_reaches_the_caller(
    job: HetSlurmJob[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(
        job,
        {rank: ("error", f"Traceback {rank}\nValueError: bad luck of {rank}") for rank in (2, 4)},
    )
    os.utime(job.task(4).paths.result_pickle, (1, 1))
    assert not job.done()  # a requeued job has such files too
    assert not job.task(4).done()
    ends(monkeypatch, "FAILED", 1)
    with pytest.raises(
        utils.FailedJobError,
        match=r"rank 4 on alpha failed; so did rank 2; job 48 is FAILED \(exit status 1\)",
    ) as caught:
        job.results()
    assert "ValueError: bad luck of 4" in str(caught.value)
    with pytest.raises(utils.FailedJobError, match="rank 2 on beta failed"):
        job.task(2).result()
    assert isinstance(job.exception(), utils.FailedJobError)


def test_results_of_all_ranks_with_an_error_are_not_the_end(
    job: HetSlurmJob[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may be requeued; its results are then removed. The state is that of the end."""
    leave(job, {rank: ("success", rank) for rank in range(6)})
    leave(job, {6: ("error", "ValueError: bad luck")})
    assert not job.done(force_check=True)
    ends(monkeypatch, "FAILED", 1)
    with pytest.raises(utils.FailedJobError, match="rank 6 on alpha failed; job 48 is FAILED"):
        job.results()


@pytest.mark.parametrize(
    "state", ["FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "COMPLETED"]
)
def test_a_death_without_a_result(
    job: HetSlurmJob[Any], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    leave(job, {rank: ("success", rank) for rank in range(5)})
    assert job.run is not None
    Path(str(job.run.log)).write_text("5: about to die\n6: so am I\n")
    ends(monkeypatch, state, 137)
    with pytest.raises(utils.UncompletedJobError) as caught:
        job.results()
    text = str(caught.value)
    assert f"job 48 is {state} (exit status 137): ranks 5, 6 left no result" in text
    assert text.endswith("5: about to die\n6: so am I")
    assert (job.state, job.done()) == (state, True)
    assert job.task(0).result() == 0
    assert job.task(5).stdout() == "about to die\n"
    assert job.stdout() == "5: about to die\n6: so am I\n"
    assert job.stderr() is None


@pytest.mark.parametrize("kept_bytes", [0, 1, 10, -1])
def test_a_half_written_result(
    job: HetSlurmJob[Any], monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    leave(job, dict.fromkeys(range(7), ("success", "x" * 100)))
    file = job.task(4).paths.result_pickle
    whole = file.read_bytes()
    file.write_bytes(whole[:kept_bytes])
    ends(monkeypatch, "COMPLETED", 0)
    with pytest.raises(
        utils.UncompletedJobError, match=r"rank 4 left no result \(the file of rank 4 is cut off\)"
    ):
        job.results()
    file.write_bytes(whole)
    assert len(job.results()) == 7


def test_no_accounting_no_job_in_squeue(
    job: HetSlurmJob[Any], monkeypatch: pytest.MonkeyPatch, stub: Callable[..., Path]
) -> None:
    """squeue is empty, scontrol has forgotten, sacct fails; then the script's marker appears."""
    monkeypatch.undo()
    monkeypatch.setattr(HetSlurmJob, "watcher", submitit_job.StateWatcher(delay_s=0))
    os.environ["PATH"] = f"{stub('squeue', 'exit 0').parent}:{os.environ['PATH']}"
    stub("scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    stub("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    try:
        job._register_in_watcher()
        assert (job.watcher.get_state("48", mode="force"), job.watcher.is_done("48")) == (
            "UNKNOWN",
            False,
        )
        stub("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
        assert job.run is not None
        (job.run.folder / "exit").write_text("status=9\nterminated=no\n")
        assert any(
            job.watcher.is_done("48", mode="force") for _ in range(100_000)
        )  # it looks once a millisecond
        assert "FAILED (exit status 9)" in str(job.exception())
    finally:
        os.environ["PATH"] = os.environ["PATH"].partition(":")[2]


def test_an_id_that_is_given_again_is_a_new_job(
    job: HetSlurmJob[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends(monkeypatch, "COMPLETED")
    assert job.done(force_check=True)
    monkeypatch.setattr(
        submitit_job, "active_states", lambda ids: {"48": JobState("48", "RUNNING", "squeue")}
    )
    again: HetSlurmJob[Any] = HetSlurmJob(tmp_path / "other", "48")
    assert not again.done()
    assert again.state == "RUNNING"


def test_a_job_from_another_process(
    job: HetSlurmJob[Any], hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(job, {rank: ("success", rank) for rank in range(7)})
    again = pickle.loads(pickle.dumps(job))
    assert again.results() == list(range(7))
    ends(monkeypatch, "FAILED")
    assert HetSlurmJob(hostile_folder / "%j", "48", range(7)).results() == list(range(7))


def test_batches_are_submitted_one_by_one(
    uneven: Path,
    tmp_path: Path,
    submitted: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("submitit"), "propagate", True)
    executor = HetSlurmExecutor(tmp_path / "f", uneven)
    with caplog.at_level(logging.INFO), executor.batch():
        jobs = [executor.submit(len, "x" * n) for n in range(3)]
    assert [job.job_id for job in jobs] == ["48", "49", "50"]
    assert len(submitted) == 3
    assert not any("--array" in script for script in submitted)
    assert "3 jobs, submitted one by one: Slurm refuses arrays of heterogeneous jobs" in caplog.text


def test_parameters(
    uneven: Path, tmp_path: Path, submitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(uneven.parent)
    auto = submitit.AutoExecutor(tmp_path / "f", cluster="het_slurm")
    auto.update_parameters(timeout_min=90, name="run", mem_gb=1.5, cpus_per_task=3, nodes=2)
    job = auto.submit(len, "")
    (script,) = submitted
    for line in (
        "--time=90",
        "--job-name=run",
        "--mem=1536M",
        "--cpus-per-task=3",
        "--nodelist=beta",
    ):
        assert f"#SBATCH {line}\n" in script
    assert "alpha" not in script
    assert job.num_tasks == 3
    assert job.submission()._timeout_min == 90

    executor = HetSlurmExecutor(tmp_path / "g", uneven)
    executor.update_parameters(
        time=60,
        env={"A": 1},
        setup=["module load cuda"],
        sbatch=["reservation=lab"],
        max_restarts=7,
        signal_seconds=30,
    )
    executor.update_parameters(gpus=4)
    script = executor.script()
    for line in (
        "export A=1",
        "module load cuda",
        "#SBATCH --reservation=lab",
        "#SBATCH --signal=USR2@30",
        "7 are allowed",
    ):
        assert line in script
    assert executor.plan().world_size == 4
    executor.update_parameters(max_restarts=0)
    assert "#SBATCH --no-requeue\n" in executor.script()


def test_parameters_of_submitits_slurm_executor_are_honoured(
    uneven: Path, tmp_path: Path, submitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoExecutor does not pass them on; existing scripts have them."""
    monkeypatch.chdir(uneven.parent)
    auto = submitit.AutoExecutor(tmp_path / "f", cluster="het_slurm", slurm_max_num_timeout=7)
    auto.update_parameters(timeout_min=90, name="run", slurm_time=30, slurm_partition="big")
    auto.update_parameters(
        slurm_setup=["module load cuda"],
        slurm_mem_per_cpu="2G",
        slurm_constraint="fast",
        slurm_signal_delay_s=45,
        slurm_additional_parameters={"gpus": 4, "env": {"A": 1}, "mail-user": "me@lab"},
    )
    assert auto.submit(len, "").submission()._timeout_countdown == 7
    (script,) = submitted
    for line in (
        "#SBATCH --time=30",
        "#SBATCH --partition=big",
        "#SBATCH --job-name=run",
        "#SBATCH --mem-per-cpu=2G",
        "#SBATCH --constraint=fast",
        "#SBATCH --signal=USR2@45",
        "#SBATCH --mail-user=me@lab",
        "module load cuda",
        "export A=1",
        "7 are allowed",
    ):
        assert line in script
    assert auto._executor._num_tasks() == 4
    for name, words in {
        "gpus_per_node": "slurm_gpus_per_node=4: the plan decides",
        "gres": "slurm_gres=4: the plan decides",
        "array_parallelism": "slurm_array_parallelism=4: jobs are submitted one by one",
        "use_srun": "slurm_use_srun=4: each rank is a task of srun",
    }.items():
        with pytest.raises(OptionsError, match=words):
            auto.update_parameters(**{f"slurm_{name}": 4})


@pytest.mark.parametrize(("given", "restarts"), [(None, 3), (0, 0), (1, 1), (100, 100)])
def test_submitit_and_the_script_count_the_same_restarts(
    uneven: Path, tmp_path: Path, submitted: list[str], given: int | None, restarts: int
) -> None:
    executor = HetSlurmExecutor(tmp_path / "f", uneven)
    executor.update_parameters(time=60)
    if given is not None:
        executor.update_parameters(max_restarts=given)
    job = executor.submit(len, "")
    assert job.submission()._timeout_countdown == restarts
    assert ("#SBATCH --requeue\n" in submitted[0]) is (restarts > 0)


def test_restarts_of_a_job_file_and_of_the_constructor(
    uneven: Path, tmp_path: Path, submitted: list[str]
) -> None:
    (tmp_path / "job.yaml").write_text("max-restarts: 7\n")
    from_file = HetSlurmExecutor(tmp_path / "f", uneven, job=tmp_path / "job.yaml")
    assert from_file.submit(len, "").submission()._timeout_countdown == 7
    default = HetSlurmExecutor(tmp_path / "f", uneven, max_num_timeout=5)
    assert default.submit(len, "").submission()._timeout_countdown == 5


def test_the_log_folder_exists_as_soon_as_the_id_is_known(
    uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm ends a job that starts before the folder of its log exists."""
    seen = []
    monkeypatch.setattr(sbatch, "submit", lambda script: "48")
    monkeypatch.setattr(
        submitit_plan, "keep_run", lambda *args, **kwargs: seen.append((tmp_path / "48").is_dir())
    )
    HetSlurmExecutor(tmp_path / "%j", uneven).submit(len, "")
    assert seen == [True]


BAD = {
    "no such parameter": ({"tiem": 3}, "unknown parameters tiem; known are account"),
    "even nodes": ({"gpus_per_node": 4}, "gpus_per_node=4: the plan decides"),
    "tasks": ({"tasks_per_node": 4}, "tasks_per_node=4: the plan decides"),
    "streams": ({"stderr_to_stdout": False}, "both streams of all ranks go to one log"),
    "time": ({"time": "12h"}, "'12h' is not a time limit"),
    "memory as text": ({"mem_gb": "4"}, "mem_gb='4' is not a number of gigabytes"),
    "no memory": ({"mem_gb": float("nan")}, "mem_gb=nan is not a number of gigabytes"),
    "too many nodes": ({"nodes": 4}, "nodes=4: the cluster has 3 nodes with GPUs"),
    "torchrun": ({"launcher": "torchrun"}, "--launcher torchrun cannot be combined with submitit"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parameters(case: str, uneven: Path, tmp_path: Path, submitted: list[str]) -> None:
    values, words = BAD[case]
    executor = HetSlurmExecutor(tmp_path / "f", uneven)

    def submit() -> None:
        executor.update_parameters(**values)
        executor.submit(len, "")

    with pytest.raises(DdpSlurmError, match=words):
        submit()
    assert submitted == []


def test_a_given_plan_is_kept(uneven: Path, tmp_path: Path) -> None:
    plan = HetSlurmExecutor(tmp_path, uneven).plan()
    with pytest.raises(OptionsError, match="was given a plan"):
        HetSlurmExecutor(tmp_path, plan=plan).update_parameters(gpus=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("1:30", 2),
        ("2:00:00", 120),
        ("1-12", 2160),
        ("1-00:30", 1470),
        ("0-0:0:1", 1),
        ("UNLIMITED", 0),
        (None, 0),
    ],
)
def test_minutes(text: str | None, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize(("timeout", "signals"), [(True, ["USR2"]), (False, ["TERM", "USR2"])])
def test_job_is_interrupted_as_submitits_page_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: bool, signals: list[str]
) -> None:
    asked: list[list[str]] = []

    def answer(argv: list[str]) -> Answer:
        asked.append(argv)
        return Answer(0, "", "")

    monkeypatch.setattr(submitit_job, "ask_slurm", answer)
    HetSlurmJob(tmp_path, "7", [0, 1])._interrupt(timeout=timeout)
    assert asked == [["scancel", f"--signal={name}", "7"] for name in signals]
    monkeypatch.setattr(submitit_job, "ask_slurm", lambda argv: Answer(1, "", "no such job"))
    with pytest.raises(DdpSlurmError, match=r"job 7 got no signal TERM: no such job"):
        HetSlurmJob(tmp_path, "7", [0, 1])._interrupt()
