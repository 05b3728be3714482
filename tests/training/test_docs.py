"""The Python of docs/training.md runs as it is."""

import re
from pathlib import Path

from .workers import example
from .worlds import world

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_the_loop_of_the_documentation_trains(tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    script = tmp_path / "loop.py"
    script.write_text(code)
    # 1000 samples: the last batch of 232 gives the rank with a share of 1 of 256 one sample; 0 stays 0.
    with world(
        tmp_path, (1, 2), example, script, [], environ={"DDP_SLURM_SHARES": "1,255,0"}
    ) as running:
        assert running.results() == [None] * 3
        assert re.fullmatch(r"loss \d\.\d{3}\n", running.log(0))
