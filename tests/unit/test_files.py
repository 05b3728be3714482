"""Files that are written completely or not at all."""

from pathlib import Path

import pytest

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import write_whole


@pytest.mark.parametrize(("content", "read"), [("é\n", "é\n".encode()), (b"\xff\0", b"\xff\0")])
def test_write_whole_replaces_the_target_of_a_link(
    tmp_path: Path, content: str | bytes, read: bytes
) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    write_whole(tmp_path / "link", content, 0o600)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "old").read_bytes() == read
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]


def test_write_whole_reports_the_path_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DdpSlurmError, match="missing/file: cannot be written: No such file"):
        write_whole(tmp_path / "missing" / "file", "")
    with pytest.raises(DdpSlurmError, match="cannot be written: it is not a regular file"):
        write_whole(tmp_path, "")
