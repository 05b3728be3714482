"""The plug-in for Lightning and what its entry points do."""

import os
import subprocess
import sys

import pytest

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


def python(code: str, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: the plug-in changes Lightning's classes."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in UNEVEN and not name.startswith("SLURM_")
    }
    return subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environ}, capture_output=True, text=True
    )


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


def test_uneven_world_is_the_launchers() -> None:
    done = python(REPORT, {**UNEVEN, "DDP_SLURM_SHARES": "4,5(x2),14(x4)"})
    assert done.stdout.splitlines()[-1] == (
        "7 5 2 2 127.0.0.1 29511 3 [4, 5, 5, 14, 14, 14, 14] "
        "{'num_replicas': 7, 'rank': 5} cpu DdpSlurmEnvironment"
    ), done.stderr


def test_even_world_keeps_the_check_of_lightning() -> None:
    done = python(REPORT, EVEN)
    assert (
        "Trainer(devices=1, num_nodes=3) makes 3 ranks, the launcher started 4, 2 on this node"
        in done.stderr
    )
    assert "{'num_replicas': 3, 'rank': 2}" in done.stdout


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
    environ: dict[str, str], words: str
) -> None:
    done = python(ALONE, environ)
    assert words in done.stderr
    assert ("the Fabric has 1 ranks, the launcher started 7" in done.stdout) is bool(environ)
    assert ("trained" in done.stdout) is not bool(environ)


SHARES = """
from ddp_slurm.lightning import DdpSlurmEnvironment
print(DdpSlurmEnvironment().planned_shares(70))
"""


@pytest.mark.parametrize("balance", ["measured", "adaptive"])
def test_measured_shares_are_refused(balance: str) -> None:
    done = python(SHARES, {**UNEVEN, "DDP_SLURM_BALANCE": balance})
    assert done.returncode != 0
    assert "needs its shares before the ranks meet" in done.stderr


def test_a_variable_that_lightning_needs_is_named() -> None:
    four = {name: UNEVEN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = python("from ddp_slurm.lightning import *; DdpSlurmEnvironment().local_rank()", four)
    assert "LOCAL_RANK is not set, and it is needed before the ranks meet" in done.stderr
