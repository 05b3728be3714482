"""Users' loops on ranks slowed 1 : 2 : 4, with and without --uneven, beside the sum of the ranks.

    python benchmarks/uneven_scripts.py [STYLE ...]
    python benchmarks/uneven_scripts.py --overhead

Each style runs on three gloo ranks of this machine, and on each of them alone with its share, which
run at once, too. A rank that is slower by n computes for one part of the time and sleeps for n - 1,
in slices of a sample: less than one core is enough for the three. (With one long
sleep in place of the computing, a virtual machine that takes unused memory away made the loop's own
code ten times as slow afterwards.)

--overhead: what --uneven costs on two ranks with equal shares: the processor time of a step of a
plain loop, with and without it in turns, and what that is of steps of 10, 30 and 100 ms.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

SECONDS_PER_SAMPLE = 0.002
SLOWNESS = (8, 4, 2)
"""Of each rank: 1 : 2 : 4, and together less than one core."""
SHARES = "1,2,4"
BATCH_SIZE = 28
"""Of the script, for each rank: the global batch is 84."""
ALONE_SHARES = tuple(84 * int(part) // 7 for part in SHARES.split(","))
STEPS = 20
WARM_UP = 5
ROUNDS = 30
"""Of a short epoch whose fastest round counts: other programs slow single rounds down."""
TURNS = 3


def make_model():  # type: ignore[no-untyped-def]
    import torch
    from torch import nn

    class Slow(nn.Module):
        """Counts samples and time over the steps after the warm-up."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)
            self.work = torch.zeros(64, 64)
            self.calls = self.samples = 0
            self.slowness = SLOWNESS[int(os.environ.get("ALONE") or os.environ["RANK"]) % 3]
            self.began = 0.0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
            if self.calls == WARM_UP:
                self.began = time.perf_counter()
            self.calls += 1
            self.samples += len(x) if self.calls > WARM_UP else 0
            for _ in range(len(x)):
                self.compute_one()
            outputs = self.layer(x)
            if labels is None:
                return outputs
            return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}

        def compute_one(self) -> None:
            """For a sample: processor time, so that other programs do not shorten the work."""
            end = time.thread_time() + SECONDS_PER_SAMPLE
            while time.thread_time() < end:
                self.work @ self.work
            time.sleep(SECONDS_PER_SAMPLE * (self.slowness - 1))

    return Slow()


def batch_size() -> int:
    """Of this rank's loader."""
    alone = os.environ.get("ALONE")
    return ALONE_SHARES[int(alone)] if alone else BATCH_SIZE


def make_data():  # type: ignore[no-untyped-def]
    import torch
    from torch.utils.data import TensorDataset

    count = int(os.environ["WORLD_SIZE"]) * batch_size() * STEPS
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 2, (count,)))


def plain(model, data) -> None:  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size(), sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()


def accelerate(model, data) -> None:  # type: ignore[no-untyped-def]
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size(), shuffle=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(wrapped(x), y))
        optimizer.step()


def lightning(model, data) -> None:  # type: ignore[no-untyped-def]
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch, index):  # type: ignore[no-untyped-def]
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):  # type: ignore[no-untyped-def]
            return torch.optim.SGD(self.parameters(), lr=0.1)

    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices="auto", strategy="ddp", max_epochs=1, **off)
    trainer.fit(Module(), DataLoader(data, batch_size(), shuffle=True))


def fabric(model, data) -> None:  # type: ignore[no-untyped-def]
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    fabric = L.Fabric(accelerator="cpu", devices="auto", strategy="ddp")
    fabric.launch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = fabric.setup(model, optimizer)
    for x, y in fabric.setup_dataloaders(DataLoader(data, batch_size(), shuffle=True)):
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.cross_entropy(wrapped(x), y))
        optimizer.step()


def hugging_face(model, data) -> None:  # type: ignore[no-untyped-def]
    import tempfile

    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=batch_size(),
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = [{"x": x, "labels": y} for x, y in data]
        Trainer(model, arguments, train_dataset=rows).train()


STYLES: dict[str, Callable[..., None]] = {
    "plain": plain,
    "accelerate": accelerate,
    "lightning": lightning,
    "fabric": fabric,
    "hugging_face": hugging_face,
}


def be_a_rank(style: str) -> None:
    import torch

    torch.manual_seed(0)
    model = make_model()
    STYLES[style](model, make_data())
    seconds = time.perf_counter() - model.began
    print("RESULT", json.dumps({"samples": model.samples, "seconds": seconds}), flush=True)


def run_ranks(words: list[str], port: int, *, uneven: bool, shares: str) -> list[dict[str, float]]:
    """What the ranks of this file measured."""
    option = ["--uneven"] if uneven else []
    world_size = len(shares.split(","))
    processes = []
    for rank in range(world_size):
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(max(0, rank - 1)),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": "1" if rank == 0 else str(world_size - 1),
            "GROUP_RANK": str(min(rank, 1)),
            "MASTER_PORT": str(port),
            "DDP_SLURM_SHARES": shares,
            "DDP_SLURM_TASKS_PER_NODE": f"1,{world_size - 1}",
        }
        processes.append(start([*option, __file__, *words], environ))
    return [result(process) for process in processes]


def start(words: list[str], environ: dict[str, str]) -> "subprocess.Popen[str]":
    common = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "ddp_slurm.run", *words]
    environ = {**os.environ, **common, **environ}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> dict[str, float]:
    output = process.communicate()[0]
    found: dict[str, float] = json.loads(output[output.index("RESULT {") + 7 :].partition("\n")[0])
    return found


def samples_per_second(style: str, port: int, *, uneven: bool) -> float:
    """Of all ranks together, after the warm-up."""
    found = run_ranks(["--rank", style], port, uneven=uneven, shares=SHARES)
    return sum(rank["samples"] for rank in found) / max(rank["seconds"] for rank in found)


def sum_alone(style: str, port: int) -> float:
    """Samples a second of the ranks, each a world of its own with its share, at once."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    processes = [
        start(
            [__file__, "--rank", style],
            {**one, "MASTER_PORT": str(port + rank), "ALONE": str(rank)},
        )
        for rank in range(len(SLOWNESS))
    ]
    found = [result(process) for process in processes]
    return sum(rank["samples"] / rank["seconds"] for rank in found)


def be_a_timed_rank() -> None:
    """Prints the processor time of a step: the median of rounds over the same short epoch."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = make_data()
    ddp = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size(), sampler=DistributedSampler(data))
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        times.append((time.process_time() - began) / len(loader))
    print("RESULT", json.dumps({"seconds": min(times)}), flush=True)


def seconds_of_a_step(*, uneven: bool) -> float:
    """Of two ranks with equal shares: the smaller processor time."""
    found = run_ranks(["--timed"], 29640 + uneven, uneven=uneven, shares="1,1")
    return min(float(rank["seconds"]) for rank in found)


def overhead() -> None:
    plain, uneven = [], []
    for _ in range(TURNS):
        plain.append(seconds_of_a_step(uneven=False))
        uneven.append(seconds_of_a_step(uneven=True))
    more = min(uneven) - min(plain)
    print(f"a step's processor time: {1e6 * min(plain):.0f} us, --uneven {1e6 * more:+.0f} us")
    for step in (0.01, 0.03, 0.1):
        print(f"  of a step of {1000 * step:.0f} ms: {more / step:.2%}")


def main(styles: list[str]) -> None:
    most = sum(1 / (SECONDS_PER_SAMPLE * slowness) for slowness in SLOWNESS)
    print(f"the computing of the samples alone would allow {most:.0f} samples/s")
    for number, style in enumerate(styles):
        total = sum_alone(style, 29610 + 8 * number)
        equal = samples_per_second(style, 29614 + 8 * number, uneven=False)
        uneven = samples_per_second(style, 29615 + 8 * number, uneven=True)
        print(
            f"{style}: the ranks alone {total:.0f} samples/s; equal {equal / total:.2f} of that, "
            f"--uneven {uneven / total:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(sys.argv[2])
    elif sys.argv[1:] == ["--timed"]:
        be_a_timed_rank()
    elif sys.argv[1:] == ["--overhead"]:
        overhead()
    else:
        main(sys.argv[1:] or list(STYLES))
