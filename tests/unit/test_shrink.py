"""``--shrink``: a plan for the nodes that Slurm can use now."""

from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import PlanError, make_plan
from ddp_slurm.plan.shrink import usable_part
from ddp_slurm.slurm_client.records import read_nodes

from .conftest import Command, Stub


def records(**states: str) -> str:
    """``scontrol show node`` of nodes in these states."""
    return "\n".join(
        f"NodeName={name} Arch=x86_64 CoresPerSocket=1\n"
        f"   NodeAddr={name} NodeHostName={name} Version=22.05.8\n"
        f"   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1\n"
        f"   Partitions=all\n"
        f"   Reason=State=IDLE is what it says [root@2026-11-28T00:19:26]\n"
        for name, state in states.items()
    )


USABLE = ["IDLE", "MIXED", "ALLOCATED", "IDLE+POWERED_DOWN", "IDLE*+POWERED_DOWN", "COMPLETING"]
UNUSABLE = ["DOWN", "IDLE*", "DOWN*", "IDLE+DRAIN", "MIXED+DRAIN", "IDLE+MAINTENANCE", "FAIL"]


@pytest.mark.parametrize("state", USABLE + UNUSABLE)
def test_shrink_leaves_out_nodes_by_state(uneven: Path, state: str) -> None:
    cluster = Cluster.load(uneven)
    options = JobOptions(global_batch_size=80)
    nodes = read_nodes(records(gamma="IDLE", beta=state, alpha="IDLE"))
    shrunk = usable_part(cluster, options, nodes)
    plan = make_plan(cluster, shrunk.options)
    assert sum(plan.shares or ()) == 80
    if state in USABLE:
        assert shrunk == (options, [])
    else:
        assert [node.name for node in plan.machines] == ["gamma", "alpha"]
        reason = "State=IDLE is what it says"
        assert shrunk.left_out == [f"left out: beta: its state is {state}: {reason}"]


def test_shrink_keeps_the_order_and_lowers_the_gpus(uneven: Path) -> None:
    options = JobOptions(nodes="alpha,beta,gamma", gpus=7)
    nodes = read_nodes(records(gamma="IDLE", alpha="IDLE"))
    shrunk = usable_part(Cluster.load(uneven), options, nodes)
    assert (shrunk.options.nodes, shrunk.options.gpus) == (("alpha", "gamma"), 5)
    assert shrunk.left_out == [
        "left out: beta: Slurm does not know it",
        "--gpus: 7 asked for, 5 are left",
    ]


def test_shrink_leaves_the_choice_of_nodes_to_the_plan(uneven: Path) -> None:
    nodes = read_nodes(records(gamma="IDLE", beta="DOWN", alpha="IDLE"))
    for named in ("auto", "auto,gamma,beta,alpha"):
        shrunk = usable_part(Cluster.load(uneven), JobOptions(nodes=named), nodes)
        assert shrunk.options.nodes == ("auto", "gamma", "alpha")
        assert [line.split(":")[1] for line in shrunk.left_out] == [" beta"]


def test_shrink_looks_at_the_chosen_nodes_only(uneven: Path) -> None:
    options = JobOptions(nodes="alpha")
    assert usable_part(Cluster.load(uneven), options, read_nodes(records(alpha="IDLE"))) == (
        options,
        [],
    )


def test_shrink_leaves_a_mistyped_node_to_the_planner(uneven: Path) -> None:
    cluster = Cluster.load(uneven)
    nodes = read_nodes(records(gamma="IDLE", beta="DOWN", alpha="IDLE"))
    shrunk = usable_part(cluster, JobOptions(nodes="gamma,beta,alhpa"), nodes)
    with pytest.raises(PlanError, match="'alhpa' is not a node of cluster 'lab'"):
        make_plan(cluster, shrunk.options)


SCONTROL = """
[ "$*" = "--all show node" ] || exit 9
cat <<'RECORDS'
@
RECORDS
"""


def test_shrink_submits_to_the_nodes_that_are_left(
    uneven: Path, submit: Command, stub: Stub, tmp_path: Path
) -> None:
    stub("scontrol", SCONTROL.replace("@", records(gamma="DOWN*", beta="IDLE", alpha="MIXED")))
    stub("sbatch", "cat > script; echo 48")
    done = submit("--shrink", "--global-batch-size", "60", "--", "train.py")
    assert (done.returncode, done.stdout) == (0, "48\n"), done.stderr
    assert "left out: gamma: its state is DOWN*" in done.stderr
    script = (tmp_path / "script").read_text()
    assert "gamma" not in script
    assert "export DDP_SLURM_GLOBAL_BATCH_SIZE=60\n" in script
    assert "export DDP_SLURM_SHARES='10(x6)'\n" in script
    kept = (tmp_path / "ddp_slurm_runs/48/job.yaml").read_text()
    assert "nodes:\n- beta\n- alpha\n" in kept


@pytest.mark.parametrize(
    ("scontrol", "typed", "words"),
    [
        (
            SCONTROL.replace("@", records(gamma="DOWN", beta="DOWN*", alpha="IDLE+DRAIN")),
            "",
            "error: left out: beta: its state is DOWN*: State=IDLE is what it says",
        ),
        ("echo no controller >&2; exit 1", "", "--shrink: scontrol --all show node: no controller"),
        (SCONTROL, "--backend torchrun", "--shrink asks Slurm which nodes it can use; it cannot"),
        (SCONTROL, "--backend local", "it cannot be combined with --backend local"),
        (SCONTROL, "--sbatch 1:mincpus=4", "it cannot be combined with --sbatch COMPONENT:KEY"),
    ],
)
def test_shrink_errors(
    uneven: Path, submit: Command, stub: Stub, scontrol: str, typed: str, words: str
) -> None:
    stub("scontrol", scontrol)
    done = submit("--backend", "sbatch", "--dry-run", "--shrink", *typed.split(), "--", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
