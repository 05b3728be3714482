"""A forecast as lines for a person."""

from collections.abc import Sequence

from ddp_slurm.console import table
from ddp_slurm.hostlist import compress_hostlist
from ddp_slurm.job.balance_option import Balance
from ddp_slurm.plan.prediction import Choice, Forecast

HEADER = ("PREDICTED", "IMAGES/S", "STEP MS", "COMPUTE", "NETWORK", "WAITING", "NODES")


def faster_line(forecast: Forecast) -> str | None:
    """The nodes that should be left out and what that changes; None where there are none."""
    if not forecast.left_out:
        return None
    return (
        f"faster without {compress_hostlist(forecast.left_out)}: "
        f"{rate_text(forecast.plan.step.rate)} -> {rate_text(forecast.best.step.rate)} images/s "
        "(--nodes auto)"
    )


def forecast_text(forecast: Forecast, balance: Balance) -> str:
    """A line for the plan, and for each thing that it can be compared with.

    COMPUTE is the slowest rank's, NETWORK what backward does not hide, WAITING for the slowest rank
    in the mean over the ranks; all in milliseconds.
    """
    rows: list[Sequence[str]] = [HEADER, _row("this plan", forecast.plan)]
    if forecast.equal is not None:
        rows.append(_row("equal split", forecast.equal))
    rows.append(_row("fastest", forecast.best))
    if forecast.single is not None:
        rows.append(_row("best node", forecast.single))
    rows.append(("sum of cards", rate_text(forecast.bound), "-", "-", "-", "-", "-"))
    return f"\n{table(rows)}\n{_source(balance)}\n"


def _row(name: str, choice: Choice) -> Sequence[str]:
    step = choice.step
    times = (step.seconds, step.compute, step.network, choice.waiting)
    milliseconds = [f"{1000 * seconds:.3g}" for seconds in times]
    return (name, rate_text(step.rate), *milliseconds, compress_hostlist(step.names))


def _source(balance: Balance) -> str:
    measured = balance.speeds.measured if balance.speeds else None
    if measured is None:
        return f"by {balance}, which has no links: the network is left out"
    what = [measured.model, measured.precision, measured.backend, measured.date]
    text = ", ".join([f"by {balance}", *(word for word in what if word)])
    if measured.network() is None:
        return f"{text}; without links: the network is left out"
    assert measured.gradient_bytes is not None
    return f"{text}; {measured.gradient_bytes / 1e6:.3g} MB of gradients"


def rate_text(rate: float) -> str:
    """``3.5``, ``950``, ``5.4k``, ``64k``, ``1.2M``.

    >>> [rate_text(rate) for rate in (3.48, 949.6, 5412, 64321, 1_234_567)]
    ['3.5', '950', '5.4k', '64k', '1.2M']
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            number = rate / size
            return f"{number:.0f}{unit}" if number >= 10 else f"{number:.1f}{unit}"
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
