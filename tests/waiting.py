"""Waiting for what another process does, where the system offers no event to wait for."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "it",
    seconds: float = 120,
) -> None:
    """Wait until ``condition()`` is true; fails after ``seconds`` and names ``what``."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            name = what if isinstance(what, str) else what()
            raise AssertionError(f"still waiting after {seconds:g} s for {name}")
        time.sleep(0.05)
