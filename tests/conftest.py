"""Shared by all tests."""

import itertools
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping

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


@pytest.fixture(autouse=True, scope="session")
def _temporary_folder() -> Iterator[None]:
    """For what jobs and torchruns that are killed leave behind. Users of a lab may write to it."""
    tempfile.gettempdir()  # this process goes on with the one that it has
    with (
        tempfile.TemporaryDirectory(prefix="ddp_slurm_tests.", ignore_cleanup_errors=True) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        os.chmod(name, 0o1777)
        patch.setitem(os.environ, "TMPDIR", name)
        yield


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

MOSTLY_WAIT = (
    "tests/slurm/test_restarts.py",
    "tests/slurm/test_cannot_start.py",
    "tests/slurm/test_lost_answer.py",
    "tests/slurm/test_reliability.py",
    "tests/hosts/",
)
"""They wait for the time limits of Slurm and of links, and leave the processors to others."""

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
            return _scope(nodeid)

    return ByFile(config, log)


def _scope(nodeid: str) -> str:
    """The name of the tests that go to one process together."""
    return nodeid if nodeid.startswith(ONE_BY_ONE) else nodeid.partition("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes: the slowest tests first, waiting and computing ones in turn."""
    if not hasattr(config, "workerinput"):
        return
    waiting: dict[str, list[pytest.Item]] = {}
    computing: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=_place):
        kind = waiting if item.nodeid.startswith(MOSTLY_WAIT) else computing
        kind.setdefault(_scope(item.nodeid), []).append(item)
    pairs = itertools.zip_longest(waiting.values(), computing.values(), fillvalue=[])
    items[:] = [item for pair in pairs for group in pair for item in group]


def _place(item: pytest.Item) -> int:
    """The index of the item's folder in SLOWEST_FIRST; its length for the rest."""
    for index, beginning in enumerate(SLOWEST_FIRST):
        if item.nodeid.startswith(beginning):
            return index
    return len(SLOWEST_FIRST)
