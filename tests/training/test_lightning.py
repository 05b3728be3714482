"""The plug-in for Lightning and what its entry points do."""

import os
from collections.abc import Callable, Iterator

import pytest

from .script_runs import Run, ScriptServer, script_server

Python = Callable[[str, dict[str, str]], Run]

UNEVEN = {
    "RANK": "5",
    "LOCAL_RANK": "2",
    "WORLD_SIZE": "7",
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "2",
    "GROUP_RANK": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "x",
    "DDP_SLURM_TASKS_PER_NODE": "1,2,4",
}
EVEN = {
    **UNEVEN,
    "RANK": "2",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "GROUP_RANK": "1",
    "DDP_SLURM_TASKS_PER_NODE": "2(x2)",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """Has imported Lightning, which takes seconds, once for all tests."""
    with script_server(tmp_path_factory.mktemp("lightning")) as running:
        yield running


@pytest.fixture
def python(server: ScriptServer) -> Python:
    """``python(code, environ)`` in a process of its own: the plug-in changes Lightning."""

    def run(code: str, environ: dict[str, str]) -> Run:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in UNEVEN and not name.startswith("SLURM_")
        }
        return server.run_in([{**kept, **environ}], ["-c", code])

    return run


REPORT = """
import lightning as L
from ddp_slurm.lightning import DdpSlurmEnvironment
e = DdpSlurmEnvironment()
t = L.Trainer(accelerator="cpu", strategy="ddp", devices=1, num_nodes=3, plugins=[e], logger=False)
s = t.strategy
s._lightning_module = None
print(e.world_size(), e.global_rank(), e.local_rank(), e.node_rank(), e.main_address, e.main_port,
      e.node_count, e.planned_shares(70), s.distributed_sampler_kwargs, s.root_device,
      type(s.cluster_environment).__name__)
e.validate_settings(1, 3)
"""


def test_uneven_world_is_the_launchers(python: Python) -> None:
    done = python(REPORT, {**UNEVEN, "DDP_SLURM_SHARES": "4,5(x2),14(x4)"})
    assert done.statuses == [0]
    assert (
        "7 5 2 2 127.0.0.1 29511 3 [4, 5, 5, 14, 14, 14, 14] "
        "{'num_replicas': 7, 'rank': 5} cpu DdpSlurmEnvironment\n"
    ) in done.output


def test_even_world_keeps_the_check_of_lightning(python: Python) -> None:
    done = python(REPORT, EVEN)
    assert (
        "Trainer(devices=1, num_nodes=3) makes 3 ranks, the launcher started 4, 2 on this node"
        in done.output
    )
    assert "{'num_replicas': 3, 'rank': 2}" in done.output


ALONE = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
try:
    L.Fabric(accelerator="cpu", devices=1).setup(BoringModel())
except Exception as error:
    print(error)
trainer = L.Trainer(
    accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False
)
trainer.fit(BoringModel())
print("trained")
"""


@pytest.mark.parametrize(
    ("environ", "words"), [(UNEVEN, "the Trainer has 1 ranks, the launcher started 7"), ({}, "")]
)
def test_trainer_and_fabric_that_would_train_alone_are_refused(
    python: Python, environ: dict[str, str], words: str
) -> None:
    done = python(ALONE, environ)
    assert words in done.output
    assert ("the Fabric has 1 ranks, the launcher started 7" in done.output) is bool(environ)
    assert ("trained" in done.output) is not bool(environ)


SHARES = """
from ddp_slurm.lightning import DdpSlurmEnvironment
print(DdpSlurmEnvironment().planned_shares(70))
"""


@pytest.mark.parametrize("balance", ["measured", "adaptive"])
def test_measured_shares_are_refused(python: Python, balance: str) -> None:
    done = python(SHARES, {**UNEVEN, "DDP_SLURM_BALANCE": balance})
    assert done.statuses != [0]
    assert "needs its shares before the ranks meet" in done.output


def test_a_variable_that_lightning_needs_is_named(python: Python) -> None:
    four = {name: UNEVEN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = python("from ddp_slurm.lightning import *; DdpSlurmEnvironment().local_rank()", four)
    assert "LOCAL_RANK is not set, and it is needed before the ranks meet" in done.output
