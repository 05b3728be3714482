"""The time of a step, and the fastest choice of nodes, against hand and brute force."""

import doctest
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_slurm import curve, exchange, predict
from ddp_slurm.balance import split_batch
from ddp_slurm.comm import Comm
from ddp_slurm.curve import Curve
from ddp_slurm.exchange import Box, Link, Network, Way
from ddp_slurm.predict import Prediction, fastest, fastest_single

MB = 1_000_000.0
GIGABIT = Link(117 * MB, 0.0001)

curves = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 1000)),
    min_size=1,
    max_size=4,
    unique_by=lambda p: p[0],
).map(lambda points: Curve.through([(n, ms / 1000) for n, ms in sorted(points)]))
links = st.tuples(st.sampled_from([6, 12, 60, 117, 1170]), st.floats(0, 0.01)).map(
    lambda link: Link(link[0] * MB, link[1])
)


@st.composite
def labs(draw: st.DrawFn) -> tuple[int, list[Box], Network]:
    """A global batch, 1 to 5 nodes with 1 to 4 ranks, and links between some of them."""
    nodes = []
    for index in range(draw(st.integers(1, 5))):
        limit = draw(st.sampled_from([3, 20, 1000]))
        rank = (draw(curves), limit)
        nodes.append(Box((f"n{index}",), (rank,) * draw(st.integers(1, 4))))
    names = [node.names[0] for node in nodes]
    pairs = [frozenset(pair) for pair in product(names, names)]
    measured = {pair: draw(links) for pair in pairs if draw(st.booleans())}
    network = Network(draw(st.sampled_from([1e5, 4e6, 5e7])), measured, draw(st.floats(0, 1)))
    ways = draw(st.sampled_from(["exact", "bf16", "local:8", "auto:bf16", "auto:local"]))
    network = network._replace(ways=exchange.ways_of(Comm.read(ways)))
    return draw(st.integers(1, 60)), nodes, network


def step_by_hand(batch: int, boxes: list[Box], network: Network) -> float | None:
    """Seconds of a step, by the shares of every rank."""
    ranks = [rank for box in boxes for rank in box.ranks]
    if sum(min(limit, batch) for _, limit in ranks) < batch:
        return None
    shares = split_batch(batch, [one for one, _ in ranks], [limit for _, limit in ranks])
    compute = max(one.seconds(n) for (one, _), n in zip(ranks, shares, strict=True))
    return predict.with_network(batch, boxes, network, compute).seconds


@pytest.mark.parametrize(
    ("points", "samples", "seconds"),
    [
        ([(10, 0.2), (20, 0.3)], 15, 0.25),
        ([(10, 0.2), (20, 0.3)], 1, 0.11),  # a fixed cost of 0.1
        ([(10, 0.2), (20, 0.3)], 0, 0.0),
        ([(10, 0.2), (20, 0.3)], 30, 0.4),
        ([(10, 0.1)], 5, 0.05),  # one point has no fixed cost
        ([(10, 0.1)], 20, 0.2),
        ([(10, 0.1), (20, 0.4)], 5, 0.05),  # never below zero
        ([(10, 0.2), (20, 0.2)], 40, 0.3),  # all sizes as slow: not free beyond them
        ([(10, 0.3), (20, 0.2), (40, 0.6)], 20, 0.3),  # a falling time is noise
    ],
)
def test_curve_between_and_beyond_its_points(
    points: list[tuple[int, float]], samples: int, seconds: float
) -> None:
    assert Curve.through(points).seconds(samples) == pytest.approx(seconds)


@given(curves, st.floats(0, 2), st.integers(0, 100))
def test_samples_within_is_the_inverse_of_seconds(one: Curve, seconds: float, limit: int) -> None:
    found = one.samples_within(seconds, limit)
    assert 0 <= found <= limit
    assert one.seconds(max(0, found - 1)) <= seconds + 1e-9
    assert found + 2 > limit or one.seconds(found + 2) > seconds - 1e-9


@settings(max_examples=60)
@given(st.lists(st.tuples(curves, st.integers(0, 9)), min_size=1, max_size=3), st.integers(0, 9))
def test_shares_have_the_shortest_step(ranks: list[tuple[Curve, int]], batch: int) -> None:
    limits = [limit for _, limit in ranks]
    batch = min(batch, sum(limits))
    shares = split_batch(batch, [one for one, _ in ranks], limits)

    def longest(shares: tuple[int, ...] | list[int]) -> float:
        return max(one.seconds(n) for (one, _), n in zip(ranks, shares, strict=True))

    all_shares = product(*(range(limit + 1) for limit in limits))
    assert sum(shares) == batch
    assert longest(shares) == min(longest(other) for other in all_shares if sum(other) == batch)


def test_shares_leave_out_a_card_with_a_fixed_cost() -> None:
    """In proportion to their speed at many samples, each would get 8."""
    slow_start = Curve.line(0.1, 0.001)
    assert split_batch(16, [Curve.line(0.0, 0.001), slow_start]) == [16, 0]
    assert split_batch(1000, [Curve.line(0.0, 0.001), slow_start]) == [550, 450]


@pytest.mark.parametrize(
    ("ranks", "way", "seconds"),
    [
        # 40 MB, 3 buckets: 2 (R - 1) / R * 40 / 117 s and 6 (R - 1) messages of 0.1 ms
        ([4, 2], exchange.PLAIN[0], 2 * 5 / 6 * 40 / 117 + 30 * 0.0001),
        ([4, 2, 1], exchange.PLAIN[0], 2 * 6 / 7 * 40 / 117 + 36 * 0.0001),
        # through the leaders; inside a node 3/2 * 40 / 4000 s
        ([4, 2], Way(), 40 / 117 + 6 * 0.0001 + 0.015),
        ([4, 2, 1], Way(), 4 / 3 * 40 / 117 + 12 * 0.0001 + 0.015),
        ([4, 2], exchange.BF16, 20 / 117 + 6 * 0.0001 + 0.015),
        ([1, 1], Way(), 40 / 117 + 6 * 0.0001),
        ([1], Way(), 0),
        ([4], Way(), 0.015),
    ],
)
def test_exchange_in_a_ring_and_in_two_levels(ranks: list[int], way: Way, seconds: float) -> None:
    boxes = [Box((f"n{i}",), ((Curve.line(0, 1), 9),) * n) for i, n in enumerate(ranks)]
    links = {frozenset(pair): GIGABIT for pair in combinations([box.names[0] for box in boxes], 2)}
    links |= {frozenset(box.names): Link(4000 * MB, 0.0) for box in boxes}
    assert exchange.exchange_seconds(boxes, Network(40 * MB, links), way) == pytest.approx(seconds)


def test_exchange_takes_one_ring_where_the_node_is_the_slower_part() -> None:
    boxes = [Box((name,), ((Curve.line(0, 1), 9),) * 2) for name in "ab"]
    links = {frozenset("ab"): GIGABIT, frozenset("a"): Link(10 * MB, 0.0)}
    network = Network(40 * MB, links)
    assert exchange.exchange_seconds(boxes, network, Way()) == exchange.exchange_seconds(
        boxes, network, exchange.PLAIN[0]
    )
    assert exchange.exchange_seconds(boxes, network, exchange.BF16) > 4


def after_second_bucket(exchange: float, hidden: float) -> float:
    """What is not hidden of 40 MB from the end of the first bucket of 1 MiB, where the second, of
    25 MiB, is the one to wait for."""
    first, second = 2**20 / (40 * MB), 26 * 2**20 / (40 * MB)
    return (1 - first) * exchange - (1 - second) * hidden


@pytest.mark.parametrize(
    ("comm", "network"),
    [
        ("exact", after_second_bucket(1.0, 0.1)),
        ("auto", after_second_bucket(1.0, 0.1)),
        ("powersgd", after_second_bucket(1.0, 0.1)),
        ("bf16", after_second_bucket(0.5, 0.1)),
        ("auto:bf16", after_second_bucket(0.5, 0.1)),
        ("local:2", 0.25 - 0.2),
        ("local:32", 0.0),
        ("auto:local", 0.0),
    ],
)
def test_network_follows_the_way_of_exchange(comm: str, network: float) -> None:
    boxes = [Box((name,), ((Curve.line(0, 0.05), 4),)) for name in "ab"]
    both = Network(40 * MB, {frozenset("ab"): Link(40 * MB, 0.0)})
    step = predict.predict(8, boxes, both._replace(ways=exchange.ways_of(Comm.read(comm))))
    assert step is not None
    assert step.compute == pytest.approx(0.2)
    assert step.network == pytest.approx(network)


@pytest.mark.parametrize(
    ("compute", "hidden", "network"),
    [
        (0.1, 0.5, after_second_bucket(0.3, 0.05)),
        (0.1, 0.0, 0.3),
        (2.0, 0.5, 0.3 * (40 * MB - 26 * 2**20) / (40 * MB)),  # buckets of 1, 25 and 12.1 MiB
    ],
)
def test_step_shows_what_backward_does_not_hide(
    compute: float, hidden: float, network: float
) -> None:
    boxes = [Box((name,), ((Curve.line(0, compute / 4), 8),)) for name in "ab"]
    both = {frozenset("ab"): Link(40 * MB / 0.3, 0.0)}
    step = predict.predict(8, boxes, Network(40 * MB, both, hidden))
    assert step is not None
    assert step[2:5] == pytest.approx((compute, network, 0.3))
    assert step.rate == pytest.approx(8 / (compute + network))


def test_link_that_was_not_measured_is_as_slow_as_its_nodes() -> None:
    fast, slow = Link(1000.0, 0.001), Link(10.0, 0.1)
    links = {frozenset("ab"): fast, frozenset("bc"): slow, frozenset("c"): fast}
    network = Network(1.0, links)
    assert network.between("a", "b") == fast
    assert network.between("a", "c") == slow
    assert network.between("a", "x") == slow, "a node without links counts as the slowest"
    assert Network(1.0, {}).between("a", "b") is None


@settings(max_examples=100, deadline=None)
@given(labs())
def test_fastest_choice_is_the_best_of_all(lab: tuple[int, list[Box], Network]) -> None:
    batch, nodes, network = lab
    sizes = range(1, len(nodes) + 1)
    choices = [list(part) for size in sizes for part in combinations(nodes, size)]
    by_hand = [step_by_hand(batch, part, network) for part in choices]
    best = fastest(batch, nodes, network)
    single = fastest_single(batch, nodes, network)
    if best is None:
        assert set(by_hand) == {None}
        return
    assert best.seconds == pytest.approx(min(one for one in by_hand if one is not None))
    assert single is None or best.seconds <= single.seconds


@settings(max_examples=30, deadline=None)
@given(labs())
def test_climb_over_groups_is_never_slower_than_one_node(
    lab: tuple[int, list[Box], Network],
) -> None:
    batch, nodes, network = lab
    exact = fastest(batch, nodes, network)
    copies = [Box((f"{box.names[0]}-{i}",), box.ranks) for box in nodes for i in range(9)]
    many = {frozenset(f"{name}-0" for name in pair): link for pair, link in network.links.items()}
    found = fastest(batch, copies, network._replace(links=many))
    single = fastest_single(batch, copies, network._replace(links=many))
    if single is not None:
        assert found is not None
        assert found.seconds <= single.seconds
    if exact is not None:
        assert found is not None


def test_many_nodes_are_chosen_by_groups() -> None:
    """A thousand fast nodes on a fast link, and a thousand behind a slow one."""
    card = (Curve.line(0.005, 0.0001), 10_000)
    nodes = [Box((f"f{i}",), (card,) * 4) for i in range(1000)]
    nodes += [Box((f"s{i}",), (card,) * 4) for i in range(1000)]
    links = {
        frozenset(("f0", "f1")): Link(10_000 * MB, 0.00001),
        frozenset(("f0", "s0")): Link(10 * MB, 0.001),
        frozenset(("s0", "s1")): Link(10 * MB, 0.001),
    }
    stand_ins = {f"{kind}{i}": f"{kind}0" for kind in "fs" for i in range(2, 1000)}
    best = fastest(200_000, nodes, Network(40 * MB, links, stand_ins=stand_ins))
    assert isinstance(best, Prediction)
    assert {name[0] for name in best.names} == {"f"}
    assert 16 <= len(best.names) <= 1000


@pytest.mark.parametrize(
    ("compute", "latency", "bucket", "network"),
    [
        # all but the last two of 39 buckets is hidden
        (8.0, 1e-4, 1 << 20, 0.04496),
        # 0.1 s a bucket: the messages of 39 buckets would take longer than backward
        (8.0, 0.1, 5 << 20, 0.4389),
        # nothing can be hidden: the fewest messages are best
        (1e-6, 1e-4, None, 2.0 + 3 * 2e-4),
    ],
)
def test_buckets_fit_the_link(
    compute: float, latency: float, bucket: int | None, network: float
) -> None:
    """40 MB that take 2 s, behind the computing of 8 samples."""
    boxes = [Box((name,), ((Curve.line(0, compute / 4), 8),)) for name in "ab"]
    link = {frozenset("ab"): Link(20 * MB, latency)}
    choices = (None, *exchange.SMALLER_BUCKETS)
    step = predict.predict(8, boxes, Network(40 * MB, link, bucket_choices=choices))
    assert step is not None
    assert step.bucket_bytes == bucket
    assert step.network == pytest.approx(network, rel=0.01)
    own = predict.predict(8, boxes, Network(40 * MB, link))
    assert own is not None
    assert own.bucket_bytes is None
    assert own.network >= step.network


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(curve).attempted >= 1
    assert doctest.testmod(curve).failed == 0
    assert doctest.testmod(exchange) == (0, 1)
