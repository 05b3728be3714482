"""Scripts of users, not a line changed, on uneven shares: exactly as one process does it all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_slurm.job_env import JobEnv, Verify
from ddp_slurm.training.scripts.compare import compare_files

from .script_runs import ScriptServer, script_server

SCRIPTS = Path(__file__).parents[1] / "scripts" / "uneven"
TASKS = (1, 2)
SHARES = "1,2,4"
"""Of a global batch of three times 7."""
ONE_LEFT = (85, 1)
"""Samples and micro-batches: four global batches of 21, and one sample, which one rank takes."""
ACCUMULATED = (94, 2)
"""The last optimizer step of an epoch has one micro-batch of 10 samples."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    with script_server(tmp_path_factory.mktemp("scripts")) as running:
        yield running


def difference(server: ScriptServer, words: list[object], *, uneven: bool = True) -> float:
    """The largest of the parameters after some 20 steps, between ranks and one process."""
    script, *arguments = words
    (alone,) = server.run([SCRIPTS / str(script), 21, *arguments]).results
    options = ["--uneven"] if uneven else []
    ranks = server.run([*options, SCRIPTS / str(script), 7, *arguments], TASKS, SHARES).results
    assert [rank["steps"] for rank in ranks] == [alone["steps"]] * 3
    pairs = [zip(rank["model"], alone["model"], strict=True) for rank in ranks]
    return max(abs(one - other) for pair in pairs for one, other in pair)


@pytest.mark.parametrize("data", [ONE_LEFT, ACCUMULATED], ids=["one left", "accumulated"])
@pytest.mark.parametrize(
    "words",
    [
        ["plain.py"],
        ["accelerate_loop.py"],
        ["lightning_trainer.py"],
        ["fabric_loop.py"],
        ["hugging_face.py", "samples"],
        ["hugging_face.py", "tokens"],
        ["hugging_face.py", "smoothed"],
        ["hugging_face.py", "own"],
    ],
    ids=" ".join,
)
def test_script_trains_as_one_process(
    server: ScriptServer, words: list[object], data: tuple[int, int]
) -> None:
    if words[0] == "hugging_face.py":
        pytest.importorskip("transformers")
    assert difference(server, [words[0], *data, *words[1:]]) < 1e-6


@pytest.mark.parametrize(
    "words",
    [
        ["plain.py"],
        ["accelerate_loop.py"],
        ["lightning_trainer.py"],
        ["fabric_loop.py"],
        ["hugging_face.py", "samples"],
        ["hugging_face.py", "tokens"],
    ],
    ids=" ".join,
)
def test_script_alone_is_not_exact(server: ScriptServer, words: list[str]) -> None:
    """The copies that fill up the last batches count: the tests above would see it."""
    if words[0] == "hugging_face.py":
        pytest.importorskip("transformers")
    assert difference(server, [words[0], *ONE_LEFT, *words[1:]], uneven=False) > 1e-3


LOOP = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
from torch.utils.data import *
class Squares(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(3), torch.tensor(1))] * 28)
class Mine(DistributedSampler):
    def __iter__(self):
        return iter(range(14))
dist.init_process_group("gloo")
torch.manual_seed(1)
data = TensorDataset(torch.randn(35, 3), torch.randint(0, 2, (35,)))
layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
loader = {loader}
model = {model}
lossf = {loss}
for epoch in range({epochs}):
    for x, y in loader:
        loss = lossf({call}, y)
        loss.backward()
{after}
"""
PARTS = {
    "loader": "DataLoader(data, batch_size=7, sampler=DistributedSampler(data))",
    "model": "DistributedDataParallel(layers)",
    "loss": "nn.CrossEntropyLoss()",
    "epochs": "1",
    "call": "model(x)",
    "after": "",
}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"loader": "DataLoader(data, batch_size=7, shuffle=True)"}, "has no DistributedSampler"),
        (
            {"loader": "DataLoader(data, batch_size=7, sampler=Mine(data))"},
            "loop.py:17 has a sampler of its own, Mine",
        ),
        ({"loader": "DataLoader(Squares(), batch_size=7)"}, "Squares, an IterableDataset"),
        (
            {"loader": "DataLoader(data, 7, sampler=DistributedSampler(data, 3, 0))"},
            "has a DistributedSampler for 3 ranks",
        ),
        (
            {"loader": "DataLoader(data, None, sampler=DistributedSampler(data))"},
            "loop.py:17 has batch_size=None",
        ),
        (
            {"loader": "DataLoader(data, 7, sampler=DistributedSampler(data), in_order=False)"},
            "loop.py:17 has in_order=False",
        ),
        (
            {"loader": "DataLoader(data, 7 + dist.get_rank(), sampler=DistributedSampler(data))"},
            "global batches of 14 to 16 samples and 3 to 3 steps",
        ),
        ({"loader": "[(torch.ones(7, 3), torch.ones(7).long())]"}, "not come from a DataLoader"),
        (
            {"loss": "nn.CrossEntropyLoss(weight=torch.ones(2))"},
            "cross_entropy with class weights is divided by the sum",
        ),
        (
            {"loss": "lambda o, t: nn.functional.cross_entropy(o, t, ignore_index=0)"},
            "loop.py:19: cross_entropy leaves out targets (ignore_index=0)",
        ),
        (
            {
                "call": "(o := model(x.requires_grad_())) + torch.autograd.grad("
                "o.sum(), x, create_graph=True)[0].sum()"
            },
            "as in a gradient penalty",
        ),
        (
            {"after": "torch.optim.SGD(model.parameters(), lr=0.1 * len(x)).step()"},
            "the learning rate of a step differs by rank: 0.2 to 0.5",
        ),
        ({"model": "fully_shard(layers)"}, "FSDP, DeepSpeed and scripts that reduce gradients"),
        ({"model": "layers", "epochs": "2"}, "has no DistributedDataParallel module"),
        ({"model": "layers", "epochs": "0"}, "so every rank worked by itself"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value.values()))[:40],
)
def test_script_that_cannot_be_exact_is_refused(
    server: ScriptServer, tmp_path: Path, parts: dict[str, str], words: str
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(**{**PARTS, **parts}))
    run = server.run(["--uneven", script], (2,), "2,5")
    assert 2 in run.statuses, run.output
    assert words in run.output
    refused = [output for output in run.outputs if words in output]
    assert "Traceback" not in refused[0]


def test_statistics_of_batch_norm_are_averaged(server: ScriptServer, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    after = """
import json
order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    inputs = layers[0](data.tensors[0][order])
means = 0
for part in inputs.split(14):
    means = 0.9 * means + 0.1 * part.mean(0)
print("RESULT", json.dumps({"found": layers[1].running_mean.tolist(), "all": means.tolist()}))
"""
    script.write_text(LOOP.format(**{**PARTS, "after": after}))
    run = server.run(["--uneven", script], (2,), "2,5")
    for rank in run.results:
        assert rank["found"] == pytest.approx(rank["all"], abs=1e-6)
    assert run.output.count("running statistics are averaged by samples") == 1


def test_sum_that_is_not_divided_by_the_batch_is_named(
    server: ScriptServer, tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(**{**PARTS, "loss": "nn.CrossEntropyLoss(reduction='sum')"}))
    run = server.run(["--uneven", script], (2,), "2,5")
    assert not any(run.statuses), run.output
    line = "loop.py:22: cross_entropy with reduction='sum' is exact only if it is divided by the"
    assert [output.count(line) for output in run.outputs] == [1, 1]


def test_evaluation_gets_the_batches_of_the_script(server: ScriptServer, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    after = """
import json
model.eval()
sizes = [len(x) for x, y in DataLoader(data, 7, sampler=DistributedSampler(data, shuffle=False))]
model.train()
trained = [len(x) for x, y in loader]
print("RESULT", json.dumps({"evaluated": sizes, "trained": trained, "steps": len(loader)}))
"""
    script.write_text(LOOP.format(**{**PARTS, "after": after}))
    small, large = server.run(["--uneven", script], (2,), "2,5").results
    assert small == {"evaluated": [7, 7, 4], "trained": [4, 4, 2], "steps": 3}
    assert large == {"evaluated": [7, 7, 4], "trained": [10, 10, 5], "steps": 3}


WEIGHTED = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import *
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(80, 6), torch.randint(0, 2, (80,)))
layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), {layer}, nn.Linear(8, 2))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=7, sampler=DistributedSampler(data)):
    weights = torch.tensor([1.0, 9.0])[y]
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    optimizer.zero_grad()
    ({loss}).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("layer", "loss", "cause"),
    [
        ("nn.Identity()", "losses.mean()", None),
        (
            "nn.Identity()",
            "(losses * weights).sum() / weights.sum()",
            "not a mean over the samples",
        ),
        ("nn.Dropout()", "losses.mean()", "Dropout draws other masks"),
        ("nn.BatchNorm1d(8)", "losses.mean()", "BatchNorm normalises by each rank's own samples"),
        ("nn.Identity()", "losses.mean() * dist.get_world_size()", "gradient is 3 times"),
    ],
    ids=["exact", "weights", "dropout", "batch norm", "scaled"],
)
def test_verify_finds_another_gradient_and_its_cause(
    server: ScriptServer, tmp_path: Path, layer: str, loss: str, cause: str | None
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(WEIGHTED.format(layer=layer, loss=loss))
    for name, tasks, shares in (("whole", (1,), "7"), ("ranks", TASKS, SHARES)):
        asked = JobEnv(verify=Verify(2, 3, str(tmp_path / name))).to_environ()
        run = server.run(["--uneven", script], tasks, shares, **asked)
        assert not any(run.statuses), run.output
    check = compare_files(str(tmp_path / "whole"), str(tmp_path / "ranks"))
    assert set(check.differences) == {"0", "3"} | ({"2"} if "Norm" in layer else set())
    assert check.is_exact is (cause is None)
    assert cause is None or cause in str(check)


def test_loops_of_many_kinds_train_as_one_process(server: ScriptServer) -> None:
    (alone,) = server.run([SCRIPTS / "kinds.py", 21]).results
    ranks = server.run(["--uneven", SCRIPTS / "kinds.py", 7], TASKS, SHARES).results
    for rank in ranks:
        assert rank == {name: pytest.approx(values, abs=1e-9) for name, values in alone.items()}


VERIFIES = """
import json, torch, torch.distributed as dist
from ddp_slurm.training import verify
dist.init_process_group("gloo")
torch.manual_seed(0)
data = [(torch.randn(14, 3), torch.randn(14, 2)) for _ in range(2)]
def own(outputs, targets):
    # each rank divides by the weights of its own samples
    return ((outputs - targets).square() * targets[:, :1] ** 2).sum() / (targets[:, 0] ** 2).sum()
model = torch.nn.Linear(3, 2)
exact, other = (verify(model, loss, data) for loss in (torch.nn.functional.mse_loss, own))
print("RESULT", json.dumps({"exact": exact.differences[""], "other": other.differences[""]}))
"""


def test_verify_in_a_world_compares_the_ranks_shares(server: ScriptServer, tmp_path: Path) -> None:
    script = tmp_path / "verifies.py"
    script.write_text(VERIFIES)
    first, *others = server.run([script], TASKS, SHARES).results
    assert first["exact"] < 1e-6
    assert first["other"] > 1e-2
    assert others == [first, first]
