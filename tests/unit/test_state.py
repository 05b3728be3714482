"""The state of a job, from recorded words of four Slurm releases and from sources that fail."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp_slurm.slurm_client.states import (
    Answer,
    ComponentState,
    JobState,
    Patience,
    StateError,
    active_states,
    ask,
    overall_state,
    parse_exit_marker,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    read_state,
    settle,
)

RECORDED = Path(__file__).with_name("job_states")
RELEASES = sorted(path.name for path in RECORDED.iterdir())
DISABLED = Answer(1, "", "Slurm accounting storage is disabled")
INVALID = Answer(1, "", "slurm_load_jobs error: Invalid job id specified")
DOWN = Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
NOTHING = Answer(0, "", "")


COMMANDS = {
    "squeue": r"squeue --noheader --jobs=[0-9]+(,[0-9]+)* --format=%i\|%T\|%N\|%r",
    "scontrol": r"scontrol --oneliner show job [0-9]+",
    "sacct": r"sacct --allocations --noheader --parsable2 --jobs=[0-9]+ --format=JobID,State,ExitCode,NodeList",
}


class Slurm:
    """Stands for the clients: an answer for each to the right command, and a note of which were asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = {"squeue": INVALID, "scontrol": INVALID, "sacct": DISABLED} | answers
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> Answer:
        self.asked.append(argv[0])
        assert re.fullmatch(COMMANDS[argv[0]], " ".join(argv))
        return self.answers[argv[0]]


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
def test_recorded_scontrol(
    release: str, name: str, state: str, reason: str, status: int, signal: int
) -> None:
    components, log = parse_scontrol(recorded(release, f"{name}.scontrol").out)
    leader = components[0].job_id.partition("+")[0]
    assert components == [
        ComponentState(f"{leader}+0", state, "gamma", reason, status, signal, 0),
        ComponentState(f"{leader}+1", state, "alpha,beta", reason, status, signal, 0),
    ]
    assert log == f"/home/me/runs/log dir/a=b-{leader}.out"
    whole = read_state(leader, ask=Slurm(scontrol=recorded(release, f"{name}.scontrol")))
    assert (whole.state, whole.exit_status) == (state, 128 + signal if signal else status)


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_running_job_as_a_whole(release: str) -> None:
    slurm = Slurm(
        squeue=recorded(release, "running.squeue"), scontrol=recorded(release, "running.scontrol")
    )
    state = read_state("1", ask=slurm)
    assert (state.state, state.source, state.exit_status) == ("RUNNING", "squeue", 0)
    assert [c.nodes for c in state.components] == ["gamma", "alpha,beta"]
    assert "sacct" not in slurm.asked


def test_squeue_lists_other_jobs_and_arrays_too() -> None:
    text = "48+1|PENDING||ReqNodeNotAvail, UnavailableNodes:a|b\n48+0|PENDING||Priority\n7_[1-3]|PENDING||None\n9|RUNNING|n1|None\n10|PENDING||(null)\nwarning\n"
    jobs = parse_squeue(text)
    assert list(jobs) == ["48", "9", "10"]
    assert jobs["10"] == [ComponentState("10", "PENDING")]
    assert jobs["9"] == [ComponentState("9", "RUNNING", "n1")]
    states = active_states(["48", "9"], Slurm(squeue=Answer(0, text, "")))
    assert states["48"].describe() == "PENDING (Priority, ReqNodeNotAvail, UnavailableNodes:a|b)"


def test_a_component_that_squeue_lists_no_more() -> None:
    scontrol = recorded("22.05", "cancelled.scontrol")
    state = read_state(
        "1", ask=Slurm(squeue=Answer(0, "1+0|COMPLETING|gamma|None\n", ""), scontrol=scontrol)
    )
    assert [(c.job_id, c.state) for c in state.components] == [
        ("1+0", "COMPLETING"),
        ("1+1", "CANCELLED"),
    ]
    assert [(c.exit_status, c.signal, c.restarts) for c in state.components] == [
        (0, 15, 0),
        (0, 15, 0),
    ]
    assert not state.is_final


def test_a_later_component_leads_to_the_whole_job() -> None:
    slurm = Slurm(squeue=Answer(0, "48+1|RUNNING|a|None\n", ""))
    assert read_state("49", ask=slurm).job_id == "48"


@pytest.mark.parametrize(
    ("states", "overall"),
    [
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["COMPLETED", "COMPLETING"], "COMPLETING"),
        (["RUNNING", "PENDING"], "RUNNING"),
        (["CANCELLED", "NODE_FAIL"], "CANCELLED"),
        (["COMPLETED", "NODE_FAIL"], "NODE_FAIL"),
        (["PENDING", "CANCELLED"], "PENDING"),
    ],
)
def test_overall_state(states: list[str], overall: str) -> None:
    components = [ComponentState(f"8+{i}", state) for i, state in enumerate(states)]
    assert overall_state(components[::-1]) == overall


@pytest.mark.parametrize(
    ("states", "final"),
    [
        (
            "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT",
            True,
        ),
        (
            "PENDING RUNNING SUSPENDED CONFIGURING COMPLETING REQUEUED REQUEUE_HOLD STOPPED RESIZING UNKNOWN",
            False,
        ),
    ],
)
def test_after_which_words_nothing_follows(states: str, final: bool) -> None:
    assert {JobState("8", state, "squeue").is_final for state in states.split()} == {final}


SACCT = "48+0|FAILED|3:0|gamma\n48+1|CANCELLED by 1000|0:15|alpha\n48+10|COMPLETED|0:0|None assigned\nbad|x\n48+1|x\n48_1|RUNNING|0:0|n1\n48+2|OUT_OF_MEMORY|0:125|b[1-2]\n"


def test_sacct_where_there_is_one() -> None:
    assert [(c.job_id, c.state, c.nodes, c.exit_status, c.signal) for c in parse_sacct(SACCT)] == [
        ("48+0", "FAILED", "gamma", 3, 0),
        ("48+1", "CANCELLED", "alpha", 0, 15),
        ("48+2", "OUT_OF_MEMORY", "b[1-2]", 0, 125),
        ("48+10", "COMPLETED", "", 0, 0),
    ]
    slurm = Slurm(sacct=Answer(0, SACCT, ""))
    state = read_state("48", lambda: "status=0\n", ask=slurm)
    assert (state.state, state.source) == ("FAILED", "sacct")
    assert slurm.asked == ["squeue", "scontrol", "sacct"]


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
    state = read_state(
        "48", lambda: "status=3\nrestarts=1\n", ask=Slurm(squeue=NOTHING, sacct=sacct)
    )
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
    state = read_state("48", lambda: "status=143\nterminated=yes\n", lambda: seen, ask=Slurm())
    assert (state.state, state.source) == ("TIMEOUT", "last look")


def test_forgotten_without_a_marker_has_failed_but_silence_has_not() -> None:
    forgotten = settle(read_state("48", ask=Slurm()))
    assert forgotten.state == "FAILED"
    assert "left no exit marker" in forgotten.describe()
    for down in (
        DOWN,
        Answer(127, "", "scontrol: No such file or directory"),
        Answer(124, "", "no answer"),
    ):
        slurm = Slurm(squeue=down)
        silent = settle(read_state("48", ask=slurm))
        assert slurm.asked == ["squeue", "sacct"]
        assert (silent.state, silent.is_final) == ("UNKNOWN", False)
        assert down.err in silent.describe()


def test_a_slurm_that_is_gone_is_asked_once() -> None:
    slurm = Slurm(squeue=DOWN, sacct=Answer(0, SACCT, ""))
    assert read_state("48", lambda: "status=0\n", ask=slurm).source == "exit marker"
    assert slurm.asked == ["squeue"]
    assert read_state("48", ask=slurm).source == "sacct"


def test_patience_ends() -> None:
    times: list[float] = []
    patience = Patience(limit_seconds=60, clock=lambda: times[-1])
    unknown, running = (
        JobState("48", "UNKNOWN", "nobody", note="no route"),
        JobState("48", "RUNNING", "squeue"),
    )
    for time, state in (
        (0.0, unknown),
        (59.0, unknown),
        (61.0, running),
        (62.0, unknown),
        (121.0, unknown),
    ):
        times.append(time)
        patience.check(state)
    times.append(123.0)
    with pytest.raises(StateError, match=r"48: Slurm has not answered for 60 s \(no route\)"):
        patience.check(unknown)


def test_clients_that_are_missing_and_the_users_formats(
    stub: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = stub
    make(
        "squeue",
        'echo "${SQUEUE_FORMAT-clean} ${SQUEUE_STATES-clean} ${SLURM_CLUSTERS-clean} ${SLURM_CONF-}"',
    )  # type: ignore[operator]
    for name, value in {
        "SQUEUE_FORMAT": "%j",
        "SQUEUE_STATES": "PD",
        "SLURM_CLUSTERS": "x",
        "SLURM_CONF": "/c",
    }.items():
        monkeypatch.setenv(name, value)
    assert ask(["squeue"]) == Answer(0, "clean clean clean /c\n", "")
    make("squeue", "exec sleep 60")  # type: ignore[operator]
    monkeypatch.setattr("ddp_slurm.slurm_client.states.ASK_SECONDS", 0.1)
    assert ask(["squeue"]) == Answer(124, "", "squeue has not answered for 0.1 s")
    missing = ask(["no-such-client"])
    assert (missing.status, missing.err) == (127, "no-such-client: No such file or directory")
