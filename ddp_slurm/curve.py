"""How long a rank's step takes for each number of samples. Standard library only."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


def rising(times: Sequence[float]) -> list[float]:
    """The times that never fall and are closest to the given ones: those that fall are noise and
    take their mean.

    >>> rising([0.010, 0.012, 0.010, 0.020])
    [0.01, 0.011, 0.011, 0.02]

    Source: pool adjacent violators, Ayer et al. 1955.
    """
    pools: list[tuple[float, int]] = []
    for time in times:
        mean, count = time, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean = (before * size + mean * count) / (size + count)
            count += size
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


class Curve(NamedTuple):
    """Seconds of a step against its samples: straight lines through measured points.

    Never falls: a point below its left neighbour is noise and takes the neighbour's time.
    """

    samples: tuple[float, ...]
    """Ascending; the first is 0."""
    times: tuple[float, ...]
    """Seconds; the first is the fixed cost of a step."""
    slope: float
    """Seconds a sample beyond the last point."""

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "Curve":
        """The curve through ``(samples, seconds)`` with ascending samples > 0 and seconds > 0.

        The first and the last line go on beyond their points. One point alone is taken as the time
        without a fixed cost. Beyond the last point a sample costs at least half of what it costs
        there on average: where Python sets the pace of all measured sizes, more samples seem free.

        >>> Curve.through([(10, 0.25), (20, 0.5)]).seconds(40)
        1.0
        """
        samples = [point[0] for point in points]
        times = list(accumulate((point[1] for point in points), max))
        average = times[-1] / samples[-1]
        if len(points) == 1:
            return cls((0.0, samples[0]), (0.0, times[0]), average)
        first_slope = (times[1] - times[0]) / (samples[1] - samples[0])
        last_slope = (times[-1] - times[-2]) / (samples[-1] - samples[-2])
        fixed = max(0.0, times[0] - first_slope * samples[0])
        slope = max(last_slope, average / 2)
        return cls((0.0, *samples), (fixed, *times), slope)

    @classmethod
    def line(cls, alpha: float, beta: float) -> "Curve":
        """``alpha + beta * n`` seconds."""
        return cls((0.0,), (alpha,), beta)

    def without(self, seconds: float) -> "Curve":
        """Of a step that lacks a part which takes so long, whatever the samples."""
        return self._replace(times=tuple(max(0.0, time - seconds) for time in self.times))

    def in_passes_of(self, most: int) -> "Curve":
        """With at most so many samples at once: beyond, a sample costs what it costs there on
        average, since a larger share takes several passes."""
        kept = [i for i, samples in enumerate(self.samples) if samples < most]
        end = self.seconds(most)
        samples = (*(self.samples[i] for i in kept), float(most))
        return Curve(samples, (*(self.times[i] for i in kept), end), end / most)

    def seconds(self, samples: float) -> float:
        """Of a step with so many samples; 0 without any."""
        if samples <= 0:
            return 0.0
        if samples >= self.samples[-1]:
            return self.times[-1] + self.slope * (samples - self.samples[-1])
        right = bisect_right(self.samples, samples)
        before, after = self.samples[right - 1], self.samples[right]
        low, high = self.times[right - 1], self.times[right]
        return low + (high - low) * (samples - before) / (after - before)

    def samples_within(self, seconds: float, limit: int) -> int:
        """The most samples, up to ``limit``, whose step takes at most so long.

        Rounding may make it one too many or too few.
        """
        if self.seconds(limit) <= seconds:
            return limit
        if self.seconds(1) > seconds:
            return 0
        if seconds >= self.times[-1]:
            return min(limit, int(self.samples[-1] + (seconds - self.times[-1]) / self.slope))
        right = bisect_right(self.times, seconds)
        before, after = self.samples[right - 1], self.samples[right]
        low, high = self.times[right - 1], self.times[right]
        return min(limit, int(before + (after - before) * (seconds - low) / (high - low)))

    def shared_by(self, gpus: int) -> "Curve":
        """Of a rank that shares its samples out to several GPUs, each as fast as this one."""
        if gpus == 1:
            return self
        return Curve(tuple(n * gpus for n in self.samples), self.times, self.slope / gpus)
