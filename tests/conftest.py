"""Shared by all tests."""

import os
import re
import signal
from collections.abc import Mapping

import pytest

# Of a shell without job control a background process inherits that SIGINT is ignored, and so do its
# children; the tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

LEFT_BY_A_LAUNCHER = re.compile(
    r"S(LURM|BATCH|RUN|QUEUE|CONTROL)_"
    r"|DDP_SLURM_"
    r"|(LOCAL_|WORLD_|MASTER_|GROUP_|NODE_)?(RANK|SIZE|ADDR|PORT)$"
)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what another job or launcher left in it."""
    return {name: value for name, value in environ.items() if not LEFT_BY_A_LAUNCHER.match(name)}


@pytest.fixture
def clean_environ() -> dict[str, str]:
    """This process's environment without what another job or launcher left in it."""
    return without_launcher(os.environ)


SLOWEST_FIRST = (
    "tests/slurm/test_restarts.py",
    "tests/slurm/test_install.py",
    "tests/hosts/",
    "tests/slurm/",
    "tests/training/",
)
"""So that the short tests fill the gaps at the end of a run with several processes."""

ONE_BY_ONE = ("tests/hosts/", "tests/slurm/test_restarts.py")
"""Here each test makes its own machines. All other files have fixtures that their tests share, so
that a file stays in one process."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes (``-n``), say which tests stay together and which begin."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        file = item.nodeid.partition("::")[0]
        if not file.startswith(ONE_BY_ONE):
            item.add_marker(pytest.mark.xdist_group(file))
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """The index of the item's folder in SLOWEST_FIRST; its length for the rest."""
    for index, beginning in enumerate(SLOWEST_FIRST):
        if item.nodeid.startswith(beginning):
            return index
    return len(SLOWEST_FIRST)
