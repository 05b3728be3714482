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
