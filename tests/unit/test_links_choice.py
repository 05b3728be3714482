"""Which way is taken, by arithmetic."""

import pytest

from ddp_slurm.comm import Comm
from ddp_slurm.training.links.choice import Measured, arithmetic, choose, steps_of_delay
from ddp_slurm.training.links.layout import Layout


def test_layout_groups_ranks_by_node() -> None:
    layout = Layout.of([1, 1, 0, 2, 2, 2])
    assert layout.nodes == ((2,), (0, 1), (3, 4, 5))
    assert layout.leaders == (2, 0, 3)
    assert str(layout) == "1+2+3"


@pytest.mark.parametrize(
    ("node_ranks", "has_two"), [([0, 0], False), ([0, 1, 2], False), ([0, 0, 1], True)]
)
def test_two_levels_need_several_nodes_and_ranks(node_ranks: list[int], has_two: bool) -> None:
    assert Layout.of(node_ranks).has_two_levels == has_two


@pytest.mark.parametrize(
    ("tasks", "flat", "two"),
    [((4, 2), 10 / 6, 1.0), ((4, 2, 1), 12 / 7, 4 / 3), ((1, 1), 1.0, 1.0), ((3,), 0.0, 0.0)],
)
def test_traffic_of_a_nodes_link(tasks: tuple[int, ...], flat: float, two: float) -> None:
    layout = Layout.of([node for node, count in enumerate(tasks) for _ in range(count)])
    assert layout.traffic(two_levels=False) == pytest.approx(flat)
    assert layout.traffic(two_levels=True) == pytest.approx(two)


@pytest.mark.parametrize(
    ("asked", "exact_seconds", "compute_seconds", "taken"),
    [
        ("auto", 9.0, 0.1, "exact"),
        ("auto:bf16", 0.1, 0.2, "exact"),
        ("auto:bf16", 0.11, 0.2, "bf16"),
        ("auto:bf16", 0.3, None, "bf16"),
        ("auto:bf16", None, 0.2, "exact"),
        ("auto:local", 0.1, 0.2, "exact"),
        ("auto:local", 0.2, 0.2, "bf16"),
        ("auto:local", 0.3, 0.2, "local:8"),
        ("auto:local", 0.8, 0.1, "local:8"),
        ("auto:local", 3.0, 0.1, "local:32"),
        ("auto:local", 99.0, 0.1, "local:64"),
        ("auto:local", 1.0, None, "local:32"),
        ("local:5", 0.1, 0.2, "local:5"),
    ],
)
def test_auto_takes_the_most_exact_way_that_is_hidden(
    asked: str, exact_seconds: float | None, compute_seconds: float | None, taken: str
) -> None:
    assert str(choose(Comm.read(asked), exact_seconds, compute_seconds)) == taken


@pytest.mark.parametrize(
    ("exchange_seconds", "delay"), [(0.18, 14), (0.018, 2), (1e-6, 1), (0.3, 16), (9.0, 16)]
)
def test_average_is_used_as_soon_as_it_has_arrived(exchange_seconds: float, delay: int) -> None:
    assert steps_of_delay(32, exchange_seconds, 0.015) == delay


def test_two_levels_must_win_clearly() -> None:
    assert Measured(flat=1.2, two_levels=1.0).two_levels_win
    assert not Measured(flat=1.05, two_levels=1.0).two_levels_win


def test_the_arithmetic_is_one_line() -> None:
    layout = Layout.of([0, 0, 0, 0, 1, 1])
    line = arithmetic(layout, 45_000_000, Measured(0.6, 0.36), 0.016)
    assert line == (
        "4+2 ranks, 45.0 MB of gradients, through a node's link in one level 1.67x, 600.0 ms; in "
        "two 1.00x, 360.0 ms; computing a step takes 16.0 ms"
    )
    assert arithmetic(layout, 1, None, None) == (
        "4+2 ranks, 0.0 MB of gradients, through a node's link in one level 1.67x; in two 1.00x; "
        "computing a step takes unknown"
    )
