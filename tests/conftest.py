"""Shared by all tests."""

import os
import re
import signal
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, settings

# Other tests run beside: what takes long is no sign of a bad test.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# A background process of a shell without job control inherits that SIGINT and SIGQUIT are ignored,
# one of nohup that SIGHUP is; its children do, too. Tests that send them would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

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


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With several processes (``-n``): the tests that one process gets at a time."""
    # Without -n there need be no xdist.
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        # The group marks of xdist 3.8 have no effect with pytest 9.2 (pytest-xdist issue 1386).
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(ONE_BY_ONE):
                return nodeid
            return nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes, the slowest tests begin."""
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """The index of the item's folder in SLOWEST_FIRST; its length for the rest."""
    for index, beginning in enumerate(SLOWEST_FIRST):
        if item.nodeid.startswith(beginning):
            return index
    return len(SLOWEST_FIRST)
