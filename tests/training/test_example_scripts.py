"""The two examples, whole."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from .workers import example
from .worlds import world

ROOT = Path(__file__).parents[2]


def archive(path: Path) -> Path:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(60) % 10
    np.savez(
        path,
        train_images=images,
        train_labels=labels,
        test_images=images[:20],
        test_labels=labels[:20],
    )
    return path


def test_synthetic_example_learns_on_seven_ranks_and_resumes(tmp_path: Path) -> None:
    script = ROOT / "synthetic_data_example" / "train.py"
    options = [
        "--global-batch-size",
        "101",
        "--snapshot",
        str(tmp_path / "s.pt"),
        "--samples",
        "600",
    ]
    options += ["--metrics", str(tmp_path / "m.jsonl")]
    plan = {
        "DDP_SLURM_SHARES": "5,24(x2),12(x4)",
        "DDP_SLURM_WORLD_SIZE": "7",
        "DDP_SLURM_TASKS_PER_NODE": "1,2,4",
    }
    for total in ("4", "6"):
        with world(
            tmp_path / total, (1, 2, 4), example, script, [total, "1", *options], environ=plan
        ) as running:
            assert running.results() == [None] * 7
            log = running.log(0)
            assert all(running.log(rank) == "" for rank in range(1, 7))
    assert "resumed from" in log
    assert "epoch 4 of 6 done" in log
    assert "rank  node" in log
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "evaluation"]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]
    assert f"finished: step 36, loss {losses[-1]:.4f}, accuracy" in log


def test_cifar10_example_trains_on_uneven_ranks(tmp_path: Path) -> None:
    script = ROOT / "cifar10_example" / "train.py"
    options = [
        "1",
        "1",
        "--data",
        str(archive(tmp_path / "c.npz")),
        "--snapshot",
        str(tmp_path / "s.pt"),
        "--label-smoothing",
        "0.2",
        "--mirror-test",
    ]
    with world(
        tmp_path, (1, 2), example, script, options, environ={"DDP_SLURM_GLOBAL_BATCH_SIZE": "16"}
    ) as running:
        assert running.results() == [None] * 3
        log = running.log(0)
    assert "first optimizer step finished at" in log
    assert "finished: step 4, loss" in log


def test_cifar10_example_schedule_follows_the_samples(
    tmp_path: Path,
) -> None:
    script = ROOT / "cifar10_example" / "train.py"
    fixed = [
        "--data",
        str(archive(tmp_path / "c.npz")),
        "--snapshot",
        str(tmp_path / "s.pt"),
        "--batch-size",
        "4",
    ]
    rates: dict[str, list[float]] = {}
    for tasks, epochs in ((1,), "2"), ((1, 2), "4"):
        options = [epochs, "1", *fixed, "--metrics", str(tmp_path / f"{epochs}.jsonl")]
        with world(tmp_path / epochs, tasks, example, script, options) as running:
            assert running.results() == [None] * sum(tasks)
        records = [
            json.loads(line) for line in (tmp_path / f"{epochs}.jsonl").read_text().splitlines()
        ]
        rates[epochs] = [record["learning_rate"] for record in records if record["kind"] == "train"]
    assert rates["2"][-1] == pytest.approx(0)
    # of each epoch's end: three and four quarters of the whole
    assert rates["4"] == pytest.approx([0.2 * 1.25 * 0.25, 0])


def test_cifar10_example_without_data_fails_on_every_rank(tmp_path: Path) -> None:
    script = ROOT / "cifar10_example" / "train.py"
    with world(
        tmp_path, (1, 1), example, script, ["1", "1", "--data", str(tmp_path / "none")]
    ) as running:
        statuses = running.wait()
        logs = running.all_logs()
    assert statuses == [2, 2]
    assert "no CIFAR-10 at" in logs
    assert "Traceback" not in logs


def test_examples_global_batch_of_the_command_line_wins(tmp_path: Path) -> None:
    script = ROOT / "synthetic_data_example" / "train.py"
    for number, (option, steps) in enumerate(
        {"--batch-size": 13, "--global-batch-size": 25}.items()
    ):
        arguments = [
            "1",
            "1",
            option,
            "4",
            "--samples",
            "100",
            "--snapshot",
            str(tmp_path / f"{number}.pt"),
        ]
        with world(
            tmp_path / str(number),
            (1, 1),
            example,
            script,
            arguments,
            environ={"DDP_SLURM_GLOBAL_BATCH_SIZE": "50"},
        ) as running:
            assert running.results() == [None, None]
            assert f"finished: step {steps}," in running.log(0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "-1"], "argument --lr: '-1' is not a number > 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number > 0"),
        (["--clip-norm", "0"], "argument --clip-norm: '0' is not a number > 0"),
        (["--weight-decay", "-0.1"], "argument --weight-decay: '-0.1' is not a number >= 0"),
        (
            ["--seed", "18446744073709551616"],
            "argument --seed: '18446744073709551616' is not a whole number from 0 to",
        ),
        (["--label-smoothing", "1.5"], "'1.5' is not a number from 0 to 1"),
        (["--batch-size", "0"], "argument --batch-size: '0' is not a whole number from 1 to"),
    ],
)
def test_examples_refuse_impossible_numbers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "1", "1", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "cifar10_example" / "train.py"), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
