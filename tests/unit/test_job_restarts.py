"""When the job script requeues its job, with stubs for srun and Slurm's clients."""

from pathlib import Path

import pytest

from ..waiting import wait_until
from .conftest import Stub
from .fake_slurm import RUNNING, FakeSlurm, MakeScript, node_record

STOP_EARLY = 'touch "$DDP_SLURM_REQUEUE_MARKER"'
REQUEUE = {"time": "10", "signal_seconds": 60, "max_restarts": 1}


def test_stop_at_the_time_limit_requeues_up_to_max_restarts(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    job = script(**REQUEUE)
    assert job.run() == 0
    assert "stopped early with a snapshot; requeued (1 of 1)" in job.log
    assert slurm.calls == ["scontrol requeue 7"]
    assert job.exit_marker is None
    assert job.run(SLURM_RESTART_COUNT="1") == 75, "the job must not read COMPLETED"
    assert "all 1 restarts are used up" in job.log
    assert job.run(SLURM_RESTART_COUNT="2") == 75
    assert slurm.calls == ["scontrol requeue 7"]


def test_subshell_that_ends_leaves_no_exit_marker(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    """One that is ended just after its fork still has the script's trap."""
    stub("srun", STOP_EARLY)
    job = script(**REQUEUE, setup=["(_ddp_on_exit)"])
    assert job.run() == 0
    assert "requeued (1 of 1)" in job.log
    assert job.exit_marker is None


@pytest.mark.parametrize("status", [0, 1])
def test_job_that_slurm_requeues_after_its_end_runs_once(
    script: MakeScript, stub: Stub, slurm: FakeSlurm, status: int
) -> None:
    """Slurm 24.11 does that to a job that was preempted, requeued itself, and then ended."""
    stub("srun", STOP_EARLY)
    job = script(**{**REQUEUE, "max_restarts": 3})
    assert job.run() == 0
    stub("srun", f"echo the ranks; exit {status}")
    assert job.run(SLURM_RESTART_COUNT="1") == status
    assert job.run(SLURM_RESTART_COUNT="2") == status
    assert ("has ended well before" in job.log) == (status == 0)
    assert job.log.count("the ranks\n") == (1 if status == 0 else 2)
    assert "status=" in (job.exit_marker or "")
    runs = job.log.count("the ranks\n")
    assert job.run(SLURM_RESTART_COUNT="3") == status
    assert job.log.count("the ranks\n") == runs + 1


def test_stop_at_the_time_limit_without_restarts_is_no_success(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    job = script(time="10", signal_seconds=60)
    assert job.run() == 75
    assert "submit again to go on" in job.log
    assert slurm.calls == []


def test_requeue_is_repeated_until_slurmctld_responds(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    away = "Unable to contact slurm controller (connect failure)\n"
    slurm.set(answers=away * 3)
    job = script(**REQUEUE)
    assert job.run() == 0
    assert slurm.calls == ["scontrol requeue 7"] * 4
    assert "requeued (1 of 1)" in job.log


def test_requeue_whose_answer_was_lost_counts(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    slurm.set(answers="Socket timed out on send/recv operation\n" * 9)
    slurm.set(components=RUNNING.replace("RUNNING 0", "COMPLETING 1"))
    job = script(**REQUEUE)
    assert job.run() == 0
    assert slurm.calls == ["scontrol requeue 7"]
    assert "requeued (1 of 1)" in job.log


def test_refused_requeue_ends_the_job_with_the_reason(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", STOP_EARLY)
    slurm.set(answers="Requested operation is presently disabled for job 7\n")
    job = script(**REQUEUE)
    assert job.run() == 75
    assert "not requeued: Requested operation is presently disabled" in job.log
    assert "requeued (1" not in job.log
    assert (job.exit_marker or "").startswith("status=75\n")


def test_requeue_without_scontrol_ends_the_job_at_once(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    """Nodes without Slurm's clients, or a --setup line that changes PATH."""
    stub("srun", STOP_EARLY)
    stub("timeout", 'shift; [[ $1 != scontrol ]] || set -- /no/scontrol; exec "$@"')
    job = script(**REQUEUE)
    assert job.run() == 75
    assert "not requeued: " in job.log
    assert "/no/scontrol" in job.log
    assert (job.exit_marker or "").startswith("status=75\n")


WAIT_FOR_SIGNALS = """
trap 'touch "$DDP_SLURM_REQUEUE_MARKER"; exit 0' USR2
trap 'exit 143' TERM
kill -TERM $PPID
while :; do /bin/sleep 0.05; done
"""


def test_sigterm_of_a_running_job_asks_the_ranks_to_save(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", WAIT_FOR_SIGNALS)
    job = script(**REQUEUE)
    assert job.run() == 0
    assert "stopped early with a snapshot; requeued (1 of 1)" in job.log
    assert job.exit_marker is None


def test_sigterm_during_setup_starts_no_ranks(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", 'echo "ranks started"')
    job = script(**REQUEUE, setup=["kill -TERM $$"])
    assert job.run() == 0
    assert "preempted; requeued (1 of 1)" in job.log
    assert "ranks started" not in job.log


def test_ranks_that_died_of_preemption_are_requeued(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", "exit 143")
    slurm.set(components=RUNNING.replace("N/A", "2026-01-01T00:00:00"))
    job = script(max_restarts=1)
    assert job.run() == 0
    assert "preempted; requeued (1 of 1)" in job.log
    slurm.set(components=RUNNING)
    assert job.run() == 143, "without a preemption it is a failure"


def test_ranks_that_end_after_an_early_sigterm_are_requeued(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    """Slurm does not report the preemption, or the host shuts down: the job still runs."""
    stub("srun", "kill -TERM $PPID; /bin/sleep 0.3; exit 143")
    job = script(max_restarts=1)
    assert job.run() == 0
    assert "preempted; requeued (1 of 1)" in job.log


@pytest.mark.parametrize("restarts", [0, 1])
def test_sigterm_of_a_cancelled_job_leaves_the_marker(
    restarts: int, script: MakeScript, stub: Stub, slurm: FakeSlurm, tmp_path: Path
) -> None:
    """At once: SIGKILL may end the script before srun has ended."""
    marker = tmp_path / "runs" / "7" / "exit"
    wait = f"until [[ -e {marker} ]]; do /bin/sleep 0.05; done"
    stub("srun", f"kill -TERM $PPID; timeout 10 bash -c '{wait}' || touch {tmp_path}/late")
    slurm.set(components=RUNNING.replace("RUNNING", "COMPLETING"))
    job = script(max_restarts=restarts)
    assert job.run() == 143
    assert (job.exit_marker or "").startswith("status=143\nterminated=yes\n")
    assert not (tmp_path / "late").exists()
    assert slurm.calls == []


def test_components_left_behind_by_a_node_failure_are_requeued(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", "kill -TERM $PPID; exec /bin/sleep 0.3")
    lost = "7 COMPLETING 1 N/A\n8 COMPLETING 1 N/A\n9 RUNNING 0 N/A\n"
    slurm.set(components=lost)
    job = script(max_restarts=1)
    assert job.run() == 143
    assert slurm.calls == ["scontrol requeue 7"]
    assert job.exit_marker is None
    slurm.set(components=RUNNING.replace("RUNNING 0", "COMPLETING 1"))
    assert job.run() == 143
    assert slurm.calls == ["scontrol requeue 7"], "all components are requeued already"


def test_other_components_follow_a_first_one_that_waits(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    """A step on the second component's node watches; the script of the first one is gone."""
    srun = stub("srun", "")
    watch = """#!/bin/bash
[[ $1 != --version ]] || exit 0
if [[ " $* " == *" --het-group=1 --overlap "* ]]; then
  exec "${@: -3}"
fi
exec /bin/sleep 1
"""
    srun.write_text(watch)
    slurm.set(steps="7.batch\n7.0\n")
    job = script(max_restarts=1)
    assert job.run() == 0
    assert slurm.calls == [], "the first component runs"
    slurm.set(components="7 PENDING 1 N/A\n8 RUNNING 0 N/A\n9 RUNNING 0 N/A\n")
    with job.start() as process:
        wait_until(lambda: slurm.calls, "the requeue", 20)
        process.wait()
    assert set(slurm.calls) == {"scontrol requeue 7"}


@pytest.mark.parametrize(
    ("release", "launcher", "calls_before", "calls"),
    [
        ("slurm 20.11.9", "srun", [], ["watch"]),
        ("slurm-wlm 20.11.4", "srun", [], ["watch"]),  # Debian's package
        ("slurm-wlm 20.11.4", "torchrun", [], []),
        ("slurm-wlm 22.05.8", "srun", ["watch"], ["watch", "watch"]),
        ("slurm 24.11.5", "torchrun", ["watch"], ["watch", "watch"]),
    ],
)
def test_watching_step_begins_as_soon_as_it_stops_no_other(
    release: str,
    launcher: str,
    calls_before: list[str],
    calls: list[str],
    script: MakeScript,
    stub: Stub,
    slurm: FakeSlurm,
) -> None:
    """On Slurm 20.11 no later step would begin beside it, such as that of the ranks."""
    answers = f"""#!/bin/bash
case " $* " in
*" --version "*) echo "{release}" ;;
*" --overlap "*) echo watch >>"$FAKE_SLURM/calls" ;;
*) /bin/sleep 1 ;;
esac
"""
    stub("srun", "").write_text(answers)
    slurm.set(steps="7.batch\n")
    job = script(max_restarts=1, launcher=launcher)
    assert job.run(SLURMD_NODENAME="gamma") == 0, job.log
    assert slurm.calls == calls_before, "no step of the ranks is seen"
    slurm.set(steps="7.batch\n7.0\n")
    assert job.run(SLURMD_NODENAME="gamma") == 0, job.log
    assert slurm.calls == calls


def test_watching_step_does_not_outlive_the_script(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    """Its srun would end the step of its number in the next start of the job."""
    slurm.set(steps="7.0\n")
    srun = stub("srun", "")
    waits = 'trap \'\' TERM; [[ " $* " != *" --overlap "* ]] || exec /bin/sleep 60'
    srun.write_text(f"#!/bin/bash\n{waits}\n/bin/sleep 0.5\n")
    job = script(max_restarts=1)
    assert job.run() == 0
    assert "Killed" not in job.log


def test_restart_cancels_the_old_steps_first(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", 'echo srun >>"$FAKE_SLURM/calls"')
    slurm.set(components="7 RUNNING 1 N/A\n8 RUNNING 0 N/A\n9 RUNNING 0 N/A\n")
    slurm.set(steps="7.batch\n8.0\n9.0\n")
    assert script(max_restarts=1).run(SLURM_RESTART_COUNT="1") == 0
    assert slurm.calls == ["scancel 8.0 9.0", "srun"]


def test_restart_goes_on_after_a_late_sigterm(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    """Slurm 20.11 may send the SIGTERM of the lost node's first run to the second one."""
    stub("srun", 'echo srun >>"$FAKE_SLURM/calls"')
    stub("sleep", "kill -TERM $PPID; kill -TERM $$")
    slurm.set(components=RUNNING.replace(" 0 ", " 1 "), steps="8.0\n")
    assert script(max_restarts=1).run(SLURM_RESTART_COUNT="1") == 0
    assert slurm.calls == ["scancel 8.0", "srun"]


def test_restart_without_a_component_requeues_all(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", 'echo srun >>"$FAKE_SLURM/calls"')
    slurm.set(components="7 RUNNING 1 N/A\n8 TIMEOUT 0 N/A\n9 RUNNING 0 N/A\n")
    job = script(max_restarts=2)
    assert job.run(SLURM_RESTART_COUNT="1") == 0
    assert slurm.calls == ["scontrol requeue 7"]
    assert "a component of the job does not run; requeued (2 of 2)" in job.log


LOST = 'echo "srun: error: Cannot communicate with node 0.  Aborting job." >&2\n'


@pytest.mark.parametrize("ending", ["exit 1", "exec /bin/sleep 60"])
def test_srun_that_lost_a_node_is_ended_and_requeued(
    ending: str, script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", LOST + ending)
    job = script(max_restarts=1)
    assert job.run() == 0
    assert slurm.calls == ["scontrol requeue 7"]
    assert "a node was lost; requeued (1 of 1)" in job.log
    assert job.run(SLURM_RESTART_COUNT="1") == (1 if ending == "exit 1" else 137)


def test_srun_that_waits_for_tasks_that_are_gone_is_ended(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    message = "srun: error: beta: tasks 0-1: Exited with exit code 1"
    stub("srun", f'echo "{message}" >&2\nexec /bin/sleep 60')
    slurm.set(nodes=node_record("2999-01-01T00:00:00"))
    job = script(max_restarts=1)
    assert job.run() == 0
    assert "a node was lost; requeued (1 of 1)" in job.log


def test_messages_of_an_earlier_attempt_do_not_end_srun(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    fails = "echo 'srun: error: alpha: task 0: Exited with exit code 1' >&2; exit 1"
    started = '"$FAKE_SLURM/started"'
    stub("srun", f"[[ -e {started} ]] || {{ touch {started}; {fails}; }}\nexec /bin/sleep 1")
    job = script(max_restarts=1, launcher="torchrun")
    assert job.run(SLURMD_NODENAME="gamma") == 0, job.log
    assert "the ranks ended with status 1; restart 1 of 1" in job.log


def test_failure_after_a_node_restarted_is_requeued(
    script: MakeScript, stub: Stub, slurm: FakeSlurm
) -> None:
    stub("srun", "exit 1")
    job = script(max_restarts=1)
    assert job.run() == 1
    assert slurm.calls == []
    slurm.set(nodes=node_record("2026-01-01T00:00:00") + node_record("2999-01-01T00:00:00"))
    assert job.run() == 0
    assert "a node was lost; requeued (1 of 1)" in job.log
