"""A job that waits for a node on which Slurm starts no job is not simply PENDING."""

from collections.abc import Sequence

import pytest

from ddp_slurm.ask import Answer
from ddp_slurm.slurm_client.absent_nodes import look_at_nodes
from ddp_slurm.slurm_client.sources import active_states, parse_scontrol, read_state
from ddp_slurm.slurm_client.states import ComponentState, JobState, Patience, StateError
from ddp_slurm.slurm_client.whole_job import job_of

from .test_shrink import records

SINCE = "2026-11-28T00:19:26"
PENDING = """\
JobId=48 HetJobId=48 HetJobOffset=0 JobName=x
   HetJobIdSet=48-49
   JobState=PENDING Reason=Resources Dependency=(null)
   ReqNodeList=gamma ExcNodeList=(null)

JobId=49 HetJobId=48 HetJobOffset=1 JobName=x
   HetJobIdSet=48-49
   JobState=PENDING Reason=Resources Dependency=(null)
   ReqNodeList=node[1-2] ExcNodeList=(null)
"""


class Slurm:
    """Answers with recorded text, and keeps what it was asked."""

    def __init__(self, job: str, **states: str) -> None:
        self.job = job
        self.nodes = records(**states)
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> Answer:
        self.asked.append(" ".join(argv))
        return Answer(0, self.nodes if "node" in argv else self.job, "")


def waiting_job(state: str = "PENDING", reason: str = "Resources") -> JobState:
    parts = [
        ComponentState("48+0", state, reason=reason, requested_nodes="gamma"),
        ComponentState("48+1", "PENDING", reason=reason, requested_nodes="node[1-2]"),
    ]
    return job_of("48", parts, "scontrol")


def look(job: JobState, **states: str) -> JobState:
    return look_at_nodes([job], Slurm("", **states))[0]


@pytest.mark.parametrize("node_state", ["DOWN+NOT_RESPONDING", "IDLE+DRAIN", "IDLE*", "FAIL"])
def test_waiting_job_names_the_node_that_is_away(node_state: str) -> None:
    slurm = Slurm(PENDING, gamma="IDLE", node1="IDLE", node2=node_state)
    job = read_state("48", ask=slurm)
    assert (job.state, job.is_waiting, job.is_final) == ("WAITS_FOR_NODE", True, False)
    expected = f"Resources: node node2 is {node_state} since {SINCE} (State=IDLE is what it says);"
    assert f"WAITS_FOR_NODE ({expected}" in job.describe()
    assert "ddp-slurm cancel 48, and submit it again with --shrink" in job.note
    assert slurm.asked[-1] == "scontrol --all show node gamma,node[1-2]"


@pytest.mark.parametrize("node_state", ["IDLE", "ALLOCATED", "IDLE*+POWERED_DOWN", "MIXED+MAINT"])
def test_job_that_waits_for_its_turn_is_pending(node_state: str) -> None:
    job = waiting_job()
    assert look(job, gamma="IDLE", node1=node_state, node2="IDLE") == job


def test_other_components_that_hold_their_nodes_are_named() -> None:
    parts = [
        ComponentState("48+0", "PENDING", requested_nodes="gamma"),
        ComponentState("48+1", "RUNNING", "node1", requested_nodes="node1"),
    ]
    job = look(job_of("48", parts, "scontrol"), gamma="DOWN", node1="DOWN")
    assert job.state == "WAITS_FOR_NODE"
    assert "node gamma is DOWN" in job.note
    assert "until then 48+1 keep theirs" in job.note
    assert "node1" not in job.note, "its component does not wait"


def test_many_nodes_are_named_shortly() -> None:
    job = waiting_job()._replace(
        components=(ComponentState("48", "PENDING", requested_nodes="n[1-9]"),)
    )
    note = look(job, **{f"n{number}": "DOWN" for number in range(1, 10)}).note
    assert "node n3 is DOWN" in note
    assert "n4" not in note
    assert "6 more nodes are unavailable;" in note


def test_slurm_is_not_asked_for_nodes_without_need() -> None:
    slurm = Slurm("", gamma="DOWN", node1="DOWN", node2="DOWN")
    running = [part._replace(state="RUNNING") for part in waiting_job().components]
    jobs = [job_of("48", running, "scontrol"), waiting_job(reason="JobHeldUser")]
    assert look_at_nodes(jobs, slurm) == jobs
    assert slurm.asked == []


def test_squeue_and_one_call_for_the_nodes_of_all_jobs() -> None:
    text = "7|PENDING||gamma|Resources\n48|PENDING||node1|Resources\n9|RUNNING|n9|n9|None\n"
    slurm = Slurm(text, gamma="IDLE", node1="DOWN")
    states = active_states(["7", "48", "9"], slurm)
    assert {job_id: state.state for job_id, state in states.items()} == {
        "7": "PENDING",
        "48": "WAITS_FOR_NODE",
        "9": "RUNNING",
    }
    assert [words.split()[0] for words in slurm.asked] == ["squeue", "scontrol"]


def test_programs_that_wait_bear_the_boot_of_a_node() -> None:
    now = [0.0]
    patience = Patience(clock=lambda: now[0])
    away = look(waiting_job(), gamma="DOWN")
    for now[0] in (0.0, 1700.0):
        patience.check(away)
    now[0] = 1900.0
    with pytest.raises(StateError, match=r"job 48 cannot start .*node gamma is DOWN"):
        patience.check(away)


def test_requested_nodes_are_read_from_the_record() -> None:
    job = parse_scontrol(PENDING)
    assert job is not None
    assert [part.requested_nodes for part in job.components] == ["gamma", "node[1-2]"]
