"""A second user of the machine, who attacks the first."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Other:
    """The second user, and a folder in which both can write."""

    name: str
    uid: int
    gid: int
    shared: Path

    def start(self, line: str) -> "subprocess.Popen[str]":
        """Runs a line of shell as the user, in the shared folder."""
        return subprocess.Popen(
            ["sh", "-c", line],
            cwd=self.shared,
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def run(self, line: str, status: int = 0) -> str:
        with self.start(line) as process:
            out, _ = process.communicate(timeout=30)
        assert process.returncode == status, out
        return out

    def plant(self, path: str, text: str) -> Path:
        """The user writes a file that all can read."""
        self.run(f"umask 022; mkdir -p {Path(path).parent}; cat >{path} <<'END'\n{text}\nEND")
        return self.shared / path
