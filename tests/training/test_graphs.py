"""Steps as graphs: the same gradient, whatever is captured, and nothing lost where it fails.

On CPUs a graph is the function that was captured, see graphs_worker; ``benchmarks/graphs.py`` has
the same comparisons with real graphs on GPUs.
"""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training import Trainer, TrainerConfig, World, init_distributed
from ddp_slurm.training.data import ResidentTensors
from ddp_slurm.training.graphs import capture
from ddp_slurm.training.graphs.compute import GraphedCompute, as_graph, reason_of_model
from ddp_slurm.training.graphs.flat import FlatGradients
from ddp_slurm.training.memory.out_of_memory import is_out_of_memory
from ddp_slurm.training.uneven import calibrate
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss

from .graphs_worker import Stand, pretend, run_graphed
from .trainer_worker import Run, reference, relative_error, run, train
from .workers import CLASSES, FEATURES, flat, make_data, make_model
from .worlds import run_world, world

ON = {"graphs": "on", "check_loss": False}


@pytest.mark.parametrize(
    ("shares", "options", "ignored"),
    [
        ((2, 0, 6), {}, 0),
        ((2, 0, 6), {}, 20),
        ((5, 1, 5), {"micro_batch": 2, "clip_norm": 0.2, "check_loss": True}, 0),
        ((5, 1, 5), {"micro_batch": 2, "clip_norm": 0.2, "check_loss": True}, 20),
    ],
)
def test_graphs_on_uneven_ranks_equal_one_process(
    tmp_path: Path, shares: tuple[int, ...], options: dict[str, Any], ignored: int
) -> None:
    options = {**ON, **options}
    settings = Run(
        shares, tmp_path / "s.pt", epochs=5, stateful=False, options=options, ignored=ignored
    )
    expected = reference(settings, options.get("clip_norm"))
    reports, calls, _ = run_graphed(tmp_path, (1, 2), settings)
    for report in reports:
        assert relative_error(report.weights, expected) < 1e-9
    # 5 samples by 2 at once are parts of 1 and of 2: two graphs. Rank 1 may have no sample.
    sizes = [len({n * (i + 1) // r - n * i // r for i in range(r)}) for n, r in _rounds(shares)]
    assert [each.captures for each in calls] == [
        size if share else 0 for size, share in zip(sizes, shares, strict=True)
    ]
    assert all(count > 5 for each in calls for count in each.replays)


def _rounds(shares: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(n, 3 if shares == (5, 1, 5) and n == 5 else 1) for n in shares]


def test_graphs_keep_the_loss_scaler_and_clipping_right(tmp_path: Path) -> None:
    options = {**ON, "precision": "fp16", "clip_norm": 0.2}
    settings = Run(
        (2, 5),
        tmp_path / "s.pt",
        epochs=4,
        dtype=torch.float32,
        stateful=False,
        options=options,
    )
    start = flat(make_model(torch.float32).parameters())
    expected = reference(settings, clip_norm=0.2) - start
    reports, calls, _ = run_graphed(tmp_path, (1, 1), settings)
    assert [each.captures for each in calls] == [1, 1]
    for report in reports:
        assert relative_error(report.weights - start, expected) < 1e-2


def test_graphs_change_no_statistic_and_no_random_number(tmp_path: Path) -> None:
    """BatchNorm, dropout, records and a stop with a resume: as without graphs."""
    plain = Run((3, 5), tmp_path / "plain.pt", epochs=5, options={"graphs": "off"})
    expected = run(tmp_path, (1, 1), plain)
    stopped = Run((3, 5), tmp_path / "s.pt", epochs=5, options=ON, usr2=(1, 13))
    [first, _], _, _ = run_graphed(tmp_path / "first", (1, 1), stopped)
    assert not first.finished
    resumed = Run((3, 5), tmp_path / "s.pt", epochs=5, options=ON)
    reports, calls, _ = run_graphed(tmp_path / "second", (1, 1), resumed, Stand(has_dropout=True))
    assert [each.captures for each in calls] == [1, 1]
    for report, other in zip(reports, expected, strict=True):
        assert report.own_batchnorm == pytest.approx(other.own_batchnorm, rel=1e-9)
        assert relative_error(report.weights, other.weights) < 1e-9
    losses = [record["loss"] for record in expected[0].records if record["kind"] == "train"]
    again = [record["loss"] for record in reports[0].records if record["kind"] == "train"]
    assert again == pytest.approx(losses[-len(again) :], rel=1e-9)


@pytest.mark.parametrize(
    ("stand", "reason"),
    [
        (Stand(error="operation not permitted\nmore"), "RuntimeError: operation not permitted\n"),
        (Stand(waits=True), "the step waits for the GPU at model.py:7\n"),
    ],
)
def test_graphs_that_fail_lose_nothing(tmp_path: Path, stand: Stand, reason: str) -> None:
    settings = Run((3, 5), tmp_path / "s.pt", stateful=False, options=ON)
    reports, calls, log = run_graphed(tmp_path, (1, 1), settings, stand)
    for report in reports:
        assert relative_error(report.weights, reference(settings)) < 1e-9
    assert [each.captures for each in calls] == [0, 0]
    assert log.count(f" has none, since {reason}") == 1


@pytest.mark.parametrize(
    ("seconds", "line", "is_used"),
    [
        ((0.5, 0.25), "graphs: in use, a step takes 250 ms with, 500 ms without\n", True),
        ((0.5, 0.49), "graphs: none, since they are not faster: a step takes 490 ms", False),
    ],
)
def test_auto_takes_graphs_that_are_faster(
    tmp_path: Path, seconds: tuple[float, float], line: str, is_used: bool
) -> None:
    settings = Run((3, 5), tmp_path / "s.pt", epochs=7, stateful=False)
    reports, calls, log = run_graphed(tmp_path, (1, 1), settings, Stand(seconds=seconds))
    for report in reports:
        assert relative_error(report.weights, reference(settings)) < 1e-9
    assert log.count(line) == 1
    assert [each.replays > [10] for each in calls] == [is_used, is_used]


def test_weights_are_counted_in_32_bits_or_more() -> None:
    for dtype, buffers in ((torch.float32, 1), (torch.bfloat16, 2)):
        flat_gradients = FlatGradients({"w": nn.Parameter(torch.ones(3, dtype=dtype))})
        flat_gradients.weight += 1_000_001
        assert flat_gradients.weight.item() == 1_000_001
        assert len(flat_gradients.buffers) == buffers
        flat_gradients.zero()
        assert flat_gradients.weight.item() == 0


def test_model_whose_layers_are_all_frozen_for_now_has_no_gradients() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    flat_gradients = FlatGradients({"w": frozen})
    flat_gradients.give_to_parameters()
    assert frozen.grad is None
    assert flat_gradients.weight.item() == 0


class Summing(nn.Module):
    """The gradient of its weight is the factor times the sum of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor, targets: Tensor, factor: Tensor, weights: Tensor) -> None:
        (self.weight * inputs.sum() * factor).backward()  # type: ignore[no-untyped-call]


VARY = "the shapes of the batches vary, or numbers in the model"
SIZES = [
    # sizes of the steps; the step at which the shares change; captures; reasons
    ([3] * 6, None, 1, []),
    ([3] * 6, 4, 1, []),
    ([3] * 8, 4, 2, []),
    (
        [n for n in range(1, 9) for _ in range(3)],
        None,
        4,
        [VARY],
    ),
]


def summed(pipe: Any) -> None:
    for sizes, forget_at, captures, expected_reasons in SIZES:
        calls = pretend(Stand())
        reasons: list[str] = []
        compute = GraphedCompute(Summing(), reasons.append, _refuse)
        factor = torch.tensor(0.5, dtype=torch.float64)
        for index, size in enumerate(sizes):
            if index == forget_at:
                compute.forget()
            inputs = torch.full((size,), float(index))
            compute([(inputs, inputs)], factor, is_whole=True)
            assert compute.flat.buffers[0][0].item() == 0.5 * index * size
        assert (calls.captures, reasons) == (captures, expected_reasons)


def _refuse(error: RuntimeError, samples: int) -> int:
    raise error


class Shrinking(Summing):
    """Counts samples; from a step on it runs out of memory when half of the work is done."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 100
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor, targets: Tensor, factor: Tensor, weights: Tensor) -> None:
        super().forward(inputs, targets, factor, weights)
        self.seen += len(inputs)
        if len(inputs) > self.limit:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


def shrunk(pipe: Any) -> None:
    for first_short_step in range(3):  # later there are graphs, which need no more memory
        pretend(Stand())
        model, reasons, ran_out = Shrinking(), [], []

        def halve(error: RuntimeError, samples: int) -> int:
            assert is_out_of_memory(error)
            ran_out.append(samples)  # noqa: B023  # called in this round only
            return samples // 2

        compute = GraphedCompute(model, reasons.append, halve)
        for step in range(3):
            model.limit = 2 if step >= first_short_step else 100
            parts = [(torch.full((size,), 1.0 + step), torch.zeros(size)) for size in (3, 5)]
            compute(parts, torch.tensor(0.5, dtype=torch.float64), is_whole=True)
            assert compute.flat.buffers[0][0].item() == 0.5 * 8 * (1 + step)
            assert model.seen.item() == 8 * (1 + step)
        assert ran_out[:1] == [5]
        assert reasons == ["its memory ran out"]


def test_graphs_out_of_memory_takes_the_step_again(tmp_path: Path) -> None:
    run_world(tmp_path, (1,), shrunk)


class Unused(Summing):
    """A parameter without a gradient, to which a graph would give zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(()))


def timed(pipe: Any) -> None:
    batch = (torch.ones(3), torch.zeros(3))
    short = Shrinking()
    short.limit = 2
    for stand, model, is_possible in (
        (Stand(), Summing(), True),
        (Stand(error="not permitted"), Summing(), False),
        (Stand(waits=True), Summing(), False),
        (Stand(), Unused(), False),
        (Stand(), short, False),
    ):
        calls = pretend(stand)
        run = as_graph(model, *batch)
        assert (run is not None) is is_possible
        if run is not None:
            run()
            assert calls.replays == [2], "the capture's own and this one"


def test_graph_to_time_is_one_that_training_would_have(tmp_path: Path) -> None:
    run_world(tmp_path, (1,), timed)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_shares_are_measured_with_graphs_where_training_has_them(
    tmp_path: Path, graphs: str
) -> None:
    options = {**ON, "graphs": graphs, "shares": None}
    settings = Run((3, 5), tmp_path / "s.pt", stateful=False, options=options)
    reports, calls, _ = run_graphed(
        tmp_path, (1, 1), settings, environ={"DDP_SLURM_BALANCE": "measured"}
    )
    for report, each in zip(reports, calls, strict=True):
        assert relative_error(report.weights, reference(settings)) < 1e-9
        measured = [count for count in each.replays if count == 1 + calibrate.REPEATS]
        assert bool(measured) is (graphs == "on")


def test_graphs_are_captured_again_for_new_sizes(tmp_path: Path) -> None:
    run_world(tmp_path, (1,), summed)


class Moody(Summing):
    """Does something in Python while it runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.rate = kind, 0, 0.1

    def forward(self, inputs: Tensor, targets: Tensor, factor: Tensor, weights: Tensor) -> None:
        super().forward(inputs, targets, factor, weights)
        if self.kind == "random":
            random.random()
        elif self.kind == "torch":
            torch.rand(())
        elif self.kind == "counts":
            self.calls += 1


def moody(pipe: Any) -> None:
    cases = [
        ("random", ["the model draws random numbers on the CPU"]),
        ("torch", ["the model draws random numbers on the CPU"]),
        ("hook", ["the module inner has a hook"]),
        ("nothing", []),
    ]
    for kind, expected in cases:
        calls, model, reasons = pretend(Stand()), Moody(kind), []
        model.add_module("inner", nn.Identity())
        if kind == "hook":
            model.inner.register_forward_hook(lambda *args: None)
        compute = GraphedCompute(model, reasons.append, _refuse)
        for _ in range(5):
            take_a_step(compute)
        assert (calls.captures, reasons) == (0 if expected else 1, expected)


def changed_outside(pipe: Any) -> None:
    calls, model = pretend(Stand()), Moody("nothing")
    model.frozen = nn.Parameter(torch.zeros(2))
    compute = GraphedCompute(model, _unexpected, _refuse)
    for step in range(10):
        if step == 4:
            model.rate = 0.2
        take_a_step(compute)
    assert calls.captures == 2
    model.frozen.requires_grad_(False)
    take_a_step(compute)
    assert model.frozen.grad is None
    assert model.weight.grad is not None
    model.new = "an attribute"
    del model.rate
    for _ in range(4):
        take_a_step(compute)
    assert calls.captures == 3


def counted(pipe: Any) -> None:
    """A number that changes in each step never gets as far as a capture."""
    calls = pretend(Stand())
    compute = GraphedCompute(Moody("counts"), _unexpected, _refuse)
    for _ in range(6):
        take_a_step(compute)
    assert calls.captures == 0


def take_a_step(compute: GraphedCompute) -> None:
    compute.begin_step()
    inputs = torch.ones(3)
    compute([(inputs, inputs)], torch.tensor(0.5, dtype=torch.float64), is_whole=True)
    assert compute.flat.buffers[0][0].item() == 1.5


def _unexpected(reason: str) -> None:
    raise AssertionError(reason)


@pytest.mark.parametrize("case", [moody, changed_outside, counted])
def test_what_a_model_does_in_python_is_not_frozen(
    tmp_path: Path, case: Callable[[Any], None]
) -> None:
    run_world(tmp_path, (1,), case)


class Partial(nn.Module):
    """Uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.used, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs)
        return outputs


def trained(world: World, case: str, graphs: str) -> Tensor:
    model = Partial()
    if case == "hook":
        model.used.weight.register_hook(lambda gradient: 0.1 * gradient)
        del model.unused
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    data = ResidentTensors(*make_data(44, torch.float32), world.device)
    settings: dict[str, Any] = {"global_batch": 8, "total_epochs": 3, "check_loss": False}
    Trainer(
        world, model, optimizer, nn.functional.cross_entropy, data, graphs=graphs, **settings
    ).train()
    return flat(model.parameters())


def trained_beside(pipe: Any, case: str) -> None:
    pretend(Stand())
    with init_distributed() as world:
        assert torch.equal(trained(world, case, "on"), trained(world, case, "off"))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unused", "the parameter unused.weight gets no gradient"),
        ("hook", "the parameter used.weight has a hook"),
    ],
)
def test_parameter_whose_gradient_a_graph_would_change(
    tmp_path: Path, case: str, reason: str
) -> None:
    with world(tmp_path, (1,), trained_beside, case) as running:
        assert running.wait() == [0], running.all_logs()
        assert running.log(0).count(f"graphs: none, since {reason}") == 1


def compiled(model: nn.Module) -> nn.Module:
    model.compile()  # nothing is compiled before the first call
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4)), "SyncBatchNorm"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "sparse gradients"),
        # Made in the test: it imports torch's compiler, which not every process needs.
        (lambda: compiled(nn.Linear(2, 2)), "compiled"),
        (lambda: nn.Linear(2, 2), None),
    ],
)
def test_model_that_cannot_be_a_graph_has_a_reason(
    model: Callable[[], nn.Module], reason: str | None
) -> None:
    found = reason_of_model(model())
    assert found is None if reason is None else reason in str(found)


def test_compiled_model_is_captured_on_request() -> None:
    assert reason_of_model(compiled(nn.Linear(2, 2)), allows_compiled=True) is None


def test_loss_with_weights_of_its_own_has_a_reason() -> None:
    loss = WeightedLoss(nn.functional.mse_loss, lambda targets: targets.sum())
    assert "target_weight" in str(loss.reason_against_graphs)
    assert WeightedLoss(nn.functional.cross_entropy).reason_against_graphs is None
    assert WeightedLoss(nn.functional.mse_loss).reason_against_graphs is None


def test_graphs_on_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    settings = Run((8,), tmp_path / "s.pt", options={"graphs": "on"})
    with world(tmp_path, (1,), train, settings) as running:
        assert running.wait() == [2]
        assert "graphs='on' is not possible: CUDA graphs need GPUs" in running.log(0)


def test_unknown_graphs_setting_is_an_error() -> None:
    with pytest.raises(DdpSlurmError, match="graphs 'atuo'"):
        TrainerConfig(global_batch=1, total_epochs=1, graphs="atuo")


def test_watch_repeats_other_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with capture.watch_for_waiting() as places:
            warnings.warn("of the model", stacklevel=1)
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["of the model"]
    assert [place.split(":")[0] for place in places] == [__file__]
