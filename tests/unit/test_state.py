"""The state of a job, from records of four Slurm releases and from sources that fail."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp_slurm.ask import Answer
from ddp_slurm.slurm_client import sources
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.slurm_client.sources import (
    active_states,
    parse_exit_marker,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    read_state,
    settle,
)
from ddp_slurm.slurm_client.states import ComponentState, JobState, Patience, StateError
from ddp_slurm.slurm_client.whole_job import job_of

from .conftest import Stub

RECORDED = Path(__file__).with_name("job_states")
RELEASES = sorted(path.name for path in RECORDED.iterdir())
DISABLED = Answer(1, "", "Slurm accounting storage is disabled")
INVALID = Answer(1, "", "slurm_load_jobs error: Invalid job id specified")
DOWN = Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
NOTHING = Answer(0, "", "")


COMMANDS = {
    "squeue": r"squeue --noheader --states=all --jobs=[0-9]+(,[0-9]+)* --format=%i\|%T\|%N\|%n\|%r",
    "scontrol": r"scontrol show job [0-9]+",
    "sacct": "sacct --allocations --noheader --parsable2 --jobs=[0-9]+ "
    "--format=JobID,State,ExitCode,NodeList",
}


class Slurm:
    """A fake of Slurm's clients: an answer to each right command; notes which were asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = {"squeue": INVALID, "scontrol": INVALID, "sacct": DISABLED} | answers
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> Answer:
        self.asked.append(argv[0])
        assert re.fullmatch(COMMANDS[argv[0]], " ".join(argv))
        return self.answers[argv[0]]


class Left:
    """A fake of a run folder."""

    def __init__(
        self,
        marker: str | None = None,
        seen: JobState | None = None,
        log: str = "",
        begun: bool = False,
    ) -> None:
        self.begun = begun
        self.marker = marker
        self.seen = seen
        self.log = log

    def exit_marker(self) -> str | None:
        return self.marker

    def last_look(self) -> JobState | None:
        return self.seen

    def has_begun(self) -> bool:
        return self.begun

    def may_log_to(self, path: str | None) -> bool:
        return not self.log or path == self.log


def recorded(release: str, name: str) -> Answer:
    return Answer(0, (RECORDED / release / name).read_text(), "")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("name", "state", "reason", "status", "signal"),
    [
        ("running", "RUNNING", "", 0, 0),
        ("failed", "FAILED", "NonZeroExitCode", 3, 0),
        ("cancelled", "CANCELLED", "", 0, 15),
    ],
)
def test_scontrol_recorded_with_hostile_name_and_comment(
    release: str, name: str, state: str, reason: str, status: int, signal: int
) -> None:
    """The job's name and comment hold JobState=, ExitCode=, Restarts=, NodeList= and StdOut=."""
    slurm = Slurm(scontrol=recorded(release, f"{name}.scontrol"))
    job = parse_scontrol(slurm.answers["scontrol"].out)
    assert job is not None
    assert job.components == tuple(
        ComponentState(f"{job.job_id}+{offset}", state, nodes, reason, status, signal, 0, nodes)
        for offset, nodes in enumerate(("gamma", "alpha,beta"))
    )
    assert job.log == f"/home/me/runs/log dir/a=b-{job.job_id}.out"
    whole = read_state(job.job_id, ask=slurm)
    assert (whole.state, whole.source) == (state, "scontrol")
    ended_with = 128 + signal if signal else status
    assert whole.exit_status == (None if state == "RUNNING" else ended_with)
    assert slurm.asked == ["scontrol"]


@pytest.mark.parametrize("release", RELEASES)
def test_later_component_leads_to_the_whole_job(release: str) -> None:
    second = recorded(release, "second_component.scontrol")
    whole = recorded(release, "failed.scontrol")
    leader = whole.out.partition("HetJobId=")[2].partition(" ")[0]

    def ask(argv: Sequence[str]) -> Answer:
        return whole if argv[-1] == leader else second

    state = read_state(str(int(leader) + 1), ask=ask)
    assert state.job_id == leader
    assert [component.job_id for component in state.components] == [f"{leader}+0", f"{leader}+1"]


@pytest.mark.parametrize("release", RELEASES)
def test_unknown_job_recorded(release: str) -> None:
    unknown = Answer(1, "", (RECORDED / release / "unknown.scontrol").read_text())
    assert settle(read_state("48", ask=Slurm(scontrol=unknown))).state == "ENDED"


@pytest.mark.parametrize("release", RELEASES)
def test_squeue_recorded(release: str) -> None:
    (state,) = active_states(["1"], Slurm(squeue=recorded(release, "running.squeue"))).values()
    assert (state.state, state.source) == ("RUNNING", "squeue")
    assert [c.nodes for c in state.components] == ["gamma", "alpha,beta"]
    assert [c.requested_nodes for c in state.components] == ["gamma", "alpha,beta"]


def test_squeue_lists_other_jobs_and_arrays_too() -> None:
    text = (
        "48+1|PENDING|||ReqNodeNotAvail, UnavailableNodes:a|b\n"
        "48+0|PENDING|||Priority\n"
        "7_[1-3]|PENDING|||None\n"
        "9|RUNNING|n1||None\n"
        "10|PENDING|||(null)\n"
        "warning\n"
    )
    jobs = parse_squeue(text)
    assert list(jobs) == ["48", "9", "10"]
    assert jobs["10"] == [ComponentState("10", "PENDING")]
    assert jobs["9"] == [ComponentState("9", "RUNNING", "n1")]
    states = active_states(["48", "9"], Slurm(squeue=Answer(0, text, "")))
    assert states["48"].describe() == "PENDING (Priority, ReqNodeNotAvail, UnavailableNodes:a|b)"


@pytest.mark.parametrize(
    ("states", "overall"),
    [
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["COMPLETED", "COMPLETING"], "COMPLETING"),
        (["RUNNING", "PENDING"], "RUNNING"),
        (["CANCELLED", "NODE_FAIL"], "CANCELLED"),
        (["COMPLETED", "NODE_FAIL"], "NODE_FAIL"),
        (["PENDING", "CANCELLED"], "CANNOT_START"),
        (["PENDING", "PENDING"], "PENDING"),
        (["REQUEUE_HOLD", "REQUEUE_HOLD"], "HELD"),
    ],
)
def test_overall_state(states: list[str], overall: str) -> None:
    components = [ComponentState(f"8+{i}", state) for i, state in enumerate(states)]
    assert job_of("8", components[::-1], "squeue").state == overall


@pytest.mark.parametrize(
    ("reason", "state", "remedy"),
    [
        ("DependencyNeverSatisfied", "CANNOT_START", "submit again without it"),
        ("BadConstraints", "CANNOT_START", "no node has what it asks for"),
        ("PartitionNodeLimit", "CANNOT_START", "MaxNodes"),
        ("PartitionTimeLimit", "CANNOT_START", "shorter --time"),
        ("InvalidAccount", "CANNOT_START", "account or QOS"),
        ("QOSMaxGRESPerJob", "CANNOT_START", "limit that holds for each job"),
        ("AssocMaxCpuPerJobLimit", "CANNOT_START", "limit that holds for each job"),
        ("AssocMaxWallDurationPerJobLimit", "CANNOT_START", "limit that holds for each job"),
        ("QOSMinGRES", "CANNOT_START", "limit that holds for each job"),
        ("JobHeldUser", "HELD", "scontrol release 48 lets it start"),
        ("launch_failed_requeued_held", "HELD", "log of slurmd"),
        ("launch failed requeued held", "HELD", "log of slurmd"),
        ("JobHoldMaxRequeue", "HELD", "MaxBatchRequeue"),
        ("job_requeued_in_held_state", "HELD", "scontrol release 48"),
        ("Resources", "PENDING", ""),
        ("QOSMaxJobsPerUserLimit", "PENDING", ""),
        ("AssocGrpCpuLimit", "PENDING", ""),
        ("ReqNodeNotAvail, UnavailableNodes:held", "PENDING", ""),
        ("", "PENDING", ""),
    ],
)
def test_job_that_cannot_start_is_not_pending(reason: str, state: str, remedy: str) -> None:
    components = [
        ComponentState("48+0", "PENDING"),
        ComponentState("48+1", "PENDING", reason=reason),
    ]
    job = job_of("48", components, "scontrol")
    assert (job.state, job.is_waiting, job.is_final) == (state, True, False)
    assert remedy in job.note
    assert bool(job.note) == bool(remedy)


def test_job_waits_for_a_component_that_has_ended() -> None:
    components = [
        ComponentState("48+0", "PENDING", reason="BeginTime"),
        ComponentState("48+1", "FAILED", reason="NonZeroExitCode"),
    ]
    job = job_of("48", components, "scontrol")
    assert job.state == "CANNOT_START"
    assert "48+1 is FAILED" in job.note
    assert "scontrol requeue 48 starts all components again" in job.note
    assert job_of("48", components[:1], "squeue", purged=["48+1"]).state == "CANNOT_START"
    ending = [*components, ComponentState("48+2", "COMPLETING")]
    assert job_of("48", ending, "scontrol").state == "PENDING"


def test_component_that_slurm_has_forgotten_is_missed() -> None:
    text = recorded("24.11", "running.scontrol").out.replace("JobState=RUNNING", "JobState=PENDING")
    job = parse_scontrol(text)
    assert job is not None
    assert job.state == "PENDING"
    first_record, second_record = text.split("\n\n")[:2]
    job = parse_scontrol(first_record)
    assert job is not None
    assert job.state == "CANNOT_START"
    assert f"{job.job_id}+1 has ended" in job.note
    later_component = parse_scontrol(second_record)
    assert later_component is not None
    assert later_component.state == "PENDING"


def test_active_states_see_a_component_that_has_ended() -> None:
    text = "48+0|PENDING|||Resources\n48+1|FAILED|b||NonZeroExitCode\n9|COMPLETED|a||None\n"
    states = active_states(["48", "9"], Slurm(squeue=Answer(0, text, "")))
    assert {job_id: state.state for job_id, state in states.items()} == {"48": "CANNOT_START"}


@pytest.mark.parametrize(
    ("states", "final"),
    [
        (
            "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED "
            "REVOKED TIMEOUT",
            True,
        ),
        (
            "PENDING RUNNING SUSPENDED CONFIGURING COMPLETING REQUEUED REQUEUE_HOLD STOPPED "
            "RESIZING UNKNOWN",
            False,
        ),
    ],
)
def test_after_which_words_nothing_follows(states: str, final: bool) -> None:
    assert {JobState("8", state, "squeue").is_final for state in states.split()} == {final}


SACCT = """\
48+0|FAILED|3:0|gamma
48+1|CANCELLED by 1000|0:15|alpha
48+10|COMPLETED|0:0|None assigned
bad|x
48+1|x
48_1|RUNNING|0:0|n1
48+2|OUT_OF_MEMORY|0:125|b[1-2]
"""


def test_sacct_where_there_is_one() -> None:
    assert [(c.job_id, c.state, c.nodes, c.exit_status, c.signal) for c in parse_sacct(SACCT)] == [
        ("48+0", "FAILED", "gamma", 3, 0),
        ("48+1", "CANCELLED", "alpha", 0, 15),
        ("48+2", "OUT_OF_MEMORY", "b[1-2]", 0, 125),
        ("48+10", "COMPLETED", "", 0, 0),
    ]
    slurm = Slurm(sacct=Answer(0, SACCT, ""))
    state = read_state("48", Left("status=0\n"), ask=slurm)
    assert (state.state, state.source) == ("FAILED", "sacct")
    assert slurm.asked == ["scontrol", "sacct"]


@pytest.mark.parametrize(
    "sacct",
    [
        DISABLED,
        Answer(1, SACCT, "connection refused"),
        NOTHING,
        Answer(127, "", "sacct: No such file"),
    ],
)
def test_sacct_failing_is_the_normal_case(sacct: Answer) -> None:
    state = read_state("48", Left("status=3\nrestarts=1\n"), ask=Slurm(sacct=sacct))
    assert (state.state, state.source, state.exit_status) == ("FAILED", "exit marker", 3)
    assert state.components[0].restarts == 1


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("status=0\nterminated=no\n", "COMPLETED"),
        ("status=143\nterminated=yes\n", "CANCELLED"),
        (
            "status=143\nterminated=no\n",
            "FAILED",
        ),  # a rank that died by SIGTERM: srun gives 143 too
        ("status=1\n", "FAILED"),
        ("status=\n", None),
        ("stat", None),
        ("", None),
        ("status=-1", None),
        ("status=x\nrestarts=0", None),
    ],
)
def test_exit_marker(text: str, state: str | None) -> None:
    found = parse_exit_marker(text)
    assert (found.state if found else None) == state
    assert (found is not None and found.reason.startswith("ended by SIGTERM")) == (
        "terminated=yes" in text
    )


def test_what_was_seen_before_counts_more_than_the_marker() -> None:
    seen = JobState(
        "48",
        "TIMEOUT",
        "scontrol",
        (ComponentState("48+0", "TIMEOUT", "gamma", "TimeLimit", 0, 1, 0),),
    )
    assert JobState.from_dict(seen.as_dict()) == seen
    state = read_state("48", Left("status=143\nterminated=yes\n", seen), ask=Slurm())
    assert (state.state, state.source) == ("TIMEOUT", "last look")


def test_forgotten_job_that_began_has_failed() -> None:
    left = Left(begun=True)
    forgotten = settle(read_state("48", left, ask=Slurm()), left)
    assert (forgotten.state, forgotten.is_final) == ("FAILED", True)
    assert "left no exit marker" in forgotten.describe()


@pytest.mark.parametrize("left", [Left(), None])
def test_forgotten_job_without_traces_has_ended_somehow(left: Left | None) -> None:
    forgotten = settle(read_state("48", left, ask=Slurm()), left)
    assert (forgotten.state, forgotten.is_final, forgotten.exit_status) == ("ENDED", True, None)
    assert "how it ended is not known" in forgotten.describe()


@pytest.mark.parametrize(
    "down",
    [
        DOWN,
        Answer(127, "", "scontrol: No such file or directory"),
        Answer(124, "", "no answer"),
    ],
)
def test_silent_slurm_leaves_a_job_unknown(down: Answer) -> None:
    slurm = Slurm(scontrol=down)
    left = Left(begun=True)
    silent = settle(read_state("48", left, ask=slurm), left)
    assert slurm.asked == ["scontrol", "sacct"]
    assert (silent.state, silent.is_final) == ("UNKNOWN", False)
    assert down.err in silent.describe()


def test_slurm_that_does_not_respond_is_asked_once() -> None:
    slurm = Slurm(scontrol=DOWN, sacct=Answer(0, SACCT, ""))
    assert read_state("48", Left("status=0\n"), ask=slurm).source == "exit marker"
    assert slurm.asked == ["scontrol"]
    assert read_state("48", ask=slurm).source == "sacct"


@pytest.mark.parametrize(("left", "seconds"), [(Left("status=0\n"), 5), (Left(), 90), (None, 90)])
def test_known_end_shortens_the_wait_for_slurm(
    left: Left | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def no_answer(argv: Sequence[str], *, timeout_seconds: float = 90) -> Answer:
        limits.append(timeout_seconds)
        return Answer(124, "", "no answer")

    monkeypatch.setattr(sources, "ask_slurm", no_answer)
    shown = sources.show_job("48", left)
    assert (shown.state, limits) == (None, [seconds])


def test_later_job_of_the_same_number_is_not_this_one() -> None:
    slurm = Slurm(scontrol=recorded("24.11", "running.scontrol"))
    state = read_state("5", Left("status=3\n", log="/mine"), ask=slurm)
    assert (state.state, state.source) == ("FAILED", "exit marker")


def test_patience_ends() -> None:
    times: list[float] = []
    patience = Patience(clock=lambda: times[-1])
    unknown = JobState("48", "UNKNOWN", "none", note="no route")
    running = JobState("48", "RUNNING", "squeue")
    looks = [
        (0.0, unknown),
        (599.0, unknown),
        (601.0, running),
        (602.0, unknown),
        (1201.0, unknown),
    ]
    for time, state in looks:
        times.append(time)
        patience.check(state)
    times.append(1203.0)
    with pytest.raises(StateError, match=r"48: Slurm has not responded for 600 s \(no route\)"):
        patience.check(unknown)


def test_patience_with_a_job_that_cannot_start() -> None:
    times = [0.0]
    patience = Patience(clock=lambda: times[-1])
    component = ComponentState("48", "PENDING", reason="DependencyNeverSatisfied")
    stuck = job_of("48", [component], "squeue")
    patience.check(stuck)
    times.append(239.0)
    patience.check(stuck)
    times.append(241.0)
    with pytest.raises(
        StateError, match=r"job 48 cannot start .*: DependencyNeverSatisfied: a job"
    ):
        patience.check(stuck)
    held = job_of("48", [ComponentState("48", "PENDING", reason="JobHeldUser")], "squeue")
    for time in (242.0, 100_000.0):
        times.append(time)
        patience.check(held)


def test_ask_slurm_hides_the_users_formats(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "SQUEUE_FORMAT": "%j",
        "SQUEUE_STATES": "PD",
        "SLURM_CLUSTERS": "x",
        "SLURM_CONF": "/c",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    echo = " ".join(f"${{{name}-clean}}" for name in values)
    stub("squeue", f'echo "{echo}"')
    assert ask_slurm(["squeue"]) == Answer(0, "clean clean clean /c\n", "")


def test_ask_slurm_answers_for_a_client_that_hangs(stub: Stub) -> None:
    stub("squeue", "exec sleep 60")
    silent = ask_slurm(["squeue"], timeout_seconds=0.1)
    assert silent == Answer(124, "", "squeue did not respond within 0.1 s")
    missing = ask_slurm(["no-such-client"])
    assert (missing.status, missing.err) == (127, "no-such-client: No such file or directory")
