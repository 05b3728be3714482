"""What torch writes beside the tests' own folders goes into one of theirs."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _torch_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch._dynamo, which the worlds' server loads, makes a folder of its own for every user of a machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor"))
        )
        yield
