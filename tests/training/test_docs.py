"""The Python of docs/training.md runs as it is."""

import re
from pathlib import Path

from .workers import example
from .worlds import world

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
LOOP, TRAINER = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)[:2]


def test_documented_loop_trains(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    # 1000 samples: of the last batch of 232 the rank with 1 of 256 gets one sample; 0 stays 0.
    plan = {"DDP_SLURM_SHARES": "1,255,0"}
    with world(tmp_path, (1, 2), example, script, [], environ=plan) as running:
        assert running.results() == [None] * 3
        assert re.fullmatch(r"loss \d\.\d{3}\n", running.log(0))


def test_documented_trainer_trains(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER.replace('"run.pt"', f'"{tmp_path}/run.pt"'))
    with world(tmp_path, (1, 1), example, script, []) as running:
        assert running.results() == [None] * 2
        assert "epoch 3/3  evaluation loss" in running.log(0)
    assert (tmp_path / "run.pt").exists()
