"""Scripts on gloo ranks with uneven shares, all forked from one process."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .worlds import rank_environments

ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """What the ranks of a script left."""

    statuses: list[int]
    outputs: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)

    @property
    def results(self) -> list[Any]:
        """The ranks' RESULT lines, in the order of ranks."""
        assert not any(self.statuses), self.output
        lines = [output[output.index("RESULT {") + 7 :] for output in self.outputs]
        return [json.loads(line.partition("\n")[0]) for line in lines]


class ScriptServer:
    """A process with torch and the frameworks imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("script_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environ, "CUDA_VISIBLE_DEVICES": ""},
        )

    def run(
        self,
        words: Sequence[object],
        tasks: Sequence[int] = (1,),
        shares: str = "",
        **variables: str,
    ) -> Run:
        """Run a script with its arguments, ``--uneven`` first or not, on ranks of several nodes."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "DDP_SLURM", "TORCHELASTIC"))
        }
        common = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TORCHELASTIC_RUN_ID": "x"}
        if shares:
            common["DDP_SLURM_SHARES"] = shares
        common["DDP_SLURM_TASKS_PER_NODE"] = ",".join(map(str, tasks))
        environs = [
            {**kept, **common, **rank, "GROUP_RANK": rank["NODE_RANK"], **variables}
            for rank in rank_environments(tasks)
        ]
        return self.run_in(environs, words)

    def run_in(self, environs: Sequence[dict[str, str]], words: Sequence[object]) -> Run:
        """Run a script, or ``-c`` and a text, as a process in each of these whole environments."""
        request = {"argv": [*map(str, words)], "environs": environs, "folder": str(self._folder)}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        statuses = json.loads(self.process.stdout.readline())
        logs = [(self._folder / f"{rank}.log").read_text() for rank in range(len(environs))]
        return Run(statuses, logs)


@contextlib.contextmanager
def script_server(folder: Path) -> Iterator[ScriptServer]:
    server = ScriptServer(folder)
    try:
        yield server
    finally:
        assert server.process.stdin
        assert server.process.stdout
        server.process.stdin.close()
        server.process.wait(60)
        server.process.stdout.close()
