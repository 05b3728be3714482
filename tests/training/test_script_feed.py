"""Which batch a module is called with, and the weights of what it returns; no ranks."""

import dataclasses
import functools
import threading
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DistributedSampler

from ddp_slurm.training.scripts.batches import Share, share_batches
from ddp_slurm.training.scripts.errors import UnevenError
from ddp_slurm.training.scripts.feed import Delivery, Feed
from ddp_slurm.training.scripts.statistics import statistics_of
from ddp_slurm.training.scripts.weights import CallWeight, unweighted, weighted

WHOLE, LAST = Share(4, 28), Share(1, 5)


class Loader:
    """As ShareBatches, whose iteration has begun."""

    def __init__(self, *shares: Share, is_divided: bool = True) -> None:
        self.shares = list(shares)
        self.is_divided = is_divided

    def __len__(self) -> int:
        return len(self.shares)


class Iterator:
    """What a script holds while it reads a loader."""


def batch(samples: int) -> tuple[Tensor, ...]:
    return (torch.ones(samples, 3),)


def epoch(ahead: int, shares: list[Share], calls: int = 1, skipped: int = 0) -> list[Share]:
    """The shares of all calls of an epoch whose reader is so many batches ahead."""
    feed = Feed()
    delivery = Delivery(Loader(*[WHOLE] * skipped, *shares), skipped)  # type: ignore[arg-type]
    found = []
    delivered = 0
    for index, share in enumerate(shares):
        while delivered < min(len(shares), index + 1 + ahead):
            feed.deliver(delivery, None)
            delivered += 1
        found += [feed.take(batch(share.size), is_training=True) for _ in range(calls)]
    return found


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("skipped", [0, 2])
def test_share_of_each_batch_is_found(ahead: int, calls: int, skipped: int) -> None:
    shares = [*[WHOLE] * 5, LAST]
    expected = [share for share in shares for _ in range(calls)]
    assert epoch(ahead, shares, calls, skipped) == expected


@pytest.mark.parametrize("ahead", [0, 1])
def test_share_is_found_by_its_turn_if_sizes_are_alike(ahead: int) -> None:
    shares = [Share(1, 7), Share(1, 7), Share(1, 5)]
    assert epoch(ahead, shares) == shares
    without_samples = [Share(2, 7), Share(2, 7), Share(0, 1)]
    assert epoch(ahead, without_samples) == without_samples


def test_batch_of_another_size_that_was_read_ahead_is_refused() -> None:
    feed = Feed()
    delivery = Delivery(Loader(WHOLE, LAST))  # type: ignore[arg-type]
    feed.deliver(delivery, None)
    feed.deliver(delivery, None)
    with pytest.raises(UnevenError, match="drop_last=True"):
        feed.take(batch(9), is_training=True)


def calls(reader: Iterator, *batches: tuple[Tensor, ...], ahead: int = 0) -> Delivery:
    """A delivery with four batches read, of which those in turn were used."""
    delivery = Delivery(Loader(*[WHOLE] * 3, LAST))  # type: ignore[arg-type]
    delivery.come_from(reader)
    for index, read in enumerate(batches):
        delivery.deliver(read)
        if index >= ahead:
            delivery.take(batches[index - ahead])
    return delivery


def numbered(samples: int, number: int) -> tuple[Tensor, ...]:
    return (torch.full((samples, 3), float(number)),)


EPOCH = [*(numbered(4, number) for number in range(3)), numbered(1, 3)]


def test_batches_that_are_used_again_are_found_by_their_size() -> None:
    """itertools.cycle, or a list of the batches."""
    reader = Iterator()
    delivery = calls(reader, *EPOCH)
    del reader
    assert [delivery.take(batch) for batch in EPOCH] == [*[WHOLE] * 3, LAST]
    with pytest.raises(UnevenError, match="batches of 1, 4 samples, a call with sizes"):
        delivery.take(batch(8))


def test_last_batch_in_two_views_is_not_an_earlier_one() -> None:
    """Four views have as many samples as an earlier batch."""
    reader = Iterator()
    assert calls(reader, *EPOCH).take(batch(4)) == LAST
    ahead = calls(reader, *EPOCH, ahead=1)
    with pytest.raises(UnevenError, match="it is not known whether the model is called"):
        ahead.take(batch(4))


def test_batches_that_a_thread_reads_ahead_are_found_by_their_size() -> None:
    reader = Iterator()
    delivery = Delivery(Loader(WHOLE, WHOLE, LAST))  # type: ignore[arg-type]
    delivery.come_from(reader)
    found = []
    for number in (1, 2):
        for _ in range(number):
            thread = threading.Thread(target=delivery.deliver, args=[None])
            thread.start()
            thread.join()
        found.append(delivery.take(batch(4)))
    assert [*found, delivery.take(batch(1))] == [WHOLE, WHOLE, LAST]


def test_batch_after_skipped_ones_is_the_latest() -> None:
    """A script that resumes in an epoch; whole and last batch have one size."""
    last = Share(4, 13)
    delivery = Delivery(Loader(WHOLE, WHOLE, WHOLE, last))  # type: ignore[arg-type]
    for number in range(3):
        delivery.deliver(numbered(4, number))
    assert delivery.take(numbered(4, 2)) == WHOLE
    delivery.deliver(numbered(4, 3))
    assert delivery.take(numbered(4, 3)) == last


def test_two_loaders_with_unlike_shares_are_refused() -> None:
    for second, is_error in ((Share(8, 56), False), (LAST, True)):
        feed = Feed()
        for share in (WHOLE, second):
            feed.deliver(Delivery(Loader(share)), None)  # type: ignore[arg-type]
        if is_error:
            with pytest.raises(UnevenError, match="two DataLoaders feed one step"):
                feed.take(batch(4), is_training=True)
        else:
            assert feed.take(batch(4), is_training=True) == second


def test_loader_of_an_evaluation_does_not_count_as_a_second_one() -> None:
    feed = Feed()
    evaluation = Loader(Share(1, 7), is_divided=False)
    feed.deliver(Delivery(evaluation), None)  # type: ignore[arg-type]
    feed.deliver(Delivery(Loader(WHOLE)), None)  # type: ignore[arg-type]
    assert feed.take(batch(4), is_training=True) == WHOLE


@pytest.mark.parametrize(
    ("rows", "samples", "is_refused"),
    [
        ([[1, 2, -100], [3, 4, -100]], 2, False),
        ([[1, 2, -100], [3, -100, -100]], 2, True),
        ([[1, 2, 3], [3, 4, 5]], 2, False),
        ([[1, 2, -100]], 1, True),
        ([[1, -100], [1, -100], [1, -100]], 4, True),
    ],
)
def test_ignored_targets_are_refused_unless_each_sample_has_as_many(
    rows: list[list[int]], samples: int, is_refused: bool
) -> None:
    target = torch.tensor(rows).flatten()
    # Here: it imports torch's compiler, seconds that only the process of this test waits for.
    from ddp_slurm.training.scripts.losses import _Looks

    refuse = functools.partial(_Looks().refuse_ignored, "cross_entropy", target, -100, samples)
    if not is_refused:
        refuse()
        return
    with pytest.raises(UnevenError, match="leaves out targets"):
        refuse()


class Script:
    """Of a training, with BatchNorm or without."""

    def __init__(self, needs_two_samples: bool) -> None:
        self.needs_two_samples = needs_two_samples

    def is_training(self, is_shuffled: bool) -> bool:
        return True


@pytest.mark.parametrize(
    ("samples", "has_norm", "last"),
    [
        (31, False, [1, 2]),
        (31, True, [0, 3]),
        (30, True, [2, 0]),
        (29, True, [0, 1]),
        (33, True, [0, 5]),
    ],
)
def test_batch_norm_gets_no_share_of_one_sample(
    monkeypatch: pytest.MonkeyPatch, samples: int, has_norm: bool, last: list[int]
) -> None:
    monkeypatch.setenv("DDP_SLURM_SHARES", "2,5")
    for rank in (0, 1):
        sampler = DistributedSampler(range(samples), 2, rank)  # type: ignore[arg-type]
        found = share_batches(BatchSampler(sampler, 7, False), 2, Script(has_norm))
        assert found is not None
        sizes = [len(batch) for batch in found]
        assert [share.own for share in found.shares] == [[4, 10][rank]] * 2 + [last[rank]]
        assert sizes[-1] == (last[rank] or 2)


def test_statistics_have_one_order_on_all_ranks() -> None:
    """The order of a set of names differs by process."""
    names = [str(number) for number in range(20)]
    model = nn.Sequential(OrderedDict((name, nn.BatchNorm1d(2)) for name in names))
    expected = [f"{name}.running_{kind}" for name in names for kind in ("mean", "var")]
    assert statistics_of(model) == expected


def test_evaluation_between_a_batch_and_its_step_is_not_its_source() -> None:
    feed, iterator = Feed(), Iterator()
    training = Delivery(Loader(WHOLE))  # type: ignore[arg-type]
    training.come_from(iterator)
    feed.deliver(training, None)
    feed.deliver(Delivery(Loader(Share(1, 3), is_divided=False)), None)  # type: ignore[arg-type]
    assert feed.take(batch(4), is_training=True) == WHOLE
    assert feed.take(batch(4), is_training=False) == Share(1, 3)
    del iterator
    assert feed.take(batch(4), is_training=True) == Share(1, 3), "the training's loop is over"


@dataclasses.dataclass
class Output:
    logits: Tensor
    name: str = "x"


class Dict(OrderedDict[str, Any]):
    """As Hugging Face's ModelOutput: keys are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


Pair = namedtuple("Pair", "logits hidden")


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda t: t, lambda o: o),
        (lambda t: (1, [t]), lambda o: o[1][0]),
        (lambda t: {"a": {"b": t}}, lambda o: o["a"]["b"]),
        (lambda t: Pair(t, None), lambda o: o.logits),
        (lambda t: Output(t), lambda o: o.logits),
        (lambda t: Dict(logits=t), lambda o: o.logits),
    ],
    ids=["tensor", "nested", "dict", "namedtuple", "dataclass", "attributes"],
)
def test_outputs_keep_their_kind_and_get_the_factor(make: Any, get: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    made = make(x * 2)
    output = weighted(made, CallWeight(lambda: 0.25))
    assert type(output) is type(made)
    get(output).mul_(3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.5] * 3


def test_loss_inside_of_the_outputs_gets_the_factor_once() -> None:
    x = torch.ones(3, requires_grad=True)
    logits = x * 2
    output = weighted({"loss": logits.sum(), "logits": logits}, CallWeight(lambda: 0.5))
    output["loss"].backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 3


def test_inputs_get_the_gradient_without_the_factor() -> None:
    x, weight = torch.ones(3, requires_grad=True), CallWeight(lambda: 0.25)
    kept = [torch.ones(2)]
    (inputs, same), options = unweighted(((x, kept), {"mask": None}), weight)
    assert same is kept
    assert options == {"mask": None}
    weighted({"a": inputs * 2}, weight)["a"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_stand_ins_add_nothing_even_if_their_loss_is_not_finite() -> None:
    x = torch.zeros(3, requires_grad=True)
    (weighted(x * 2, CallWeight(lambda: 0)) / 0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0] * 3


def test_output_whose_tensors_cannot_be_found_is_refused() -> None:
    with pytest.raises(UnevenError, match="the model returns an object of type object"):
        weighted(object(), CallWeight(lambda: 0.5))


@pytest.mark.parametrize(("is_mean", "factor"), [(True, 3 * 4 / 28), (False, 1)])
def test_weight_waits_for_the_loss_of_a_trainer_that_counts_tokens(
    is_mean: bool, factor: float
) -> None:
    """A compute_loss of the script may take a mean over the samples outside of the model."""
    from ddp_slurm.training.scripts.modules import Modules

    modules = Modules(3)
    modules.share = WHOLE
    modules._set_mean_over_tokens(True)
    weight = modules.weight()
    modules._set_mean_over_tokens(False)
    modules.has_mean_loss = is_mean
    assert weight is not None
    assert weight.factor() == pytest.approx(factor)
