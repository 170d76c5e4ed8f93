import errno
from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid, StageFailed
from compress.pipelines.results.schema import Report
from compress.pipelines.system.error_context import readable_disk_errors


def test_a_full_disk_is_said_with_path_and_remedy(tmp_path: Path) -> None:
    expected = r"a\.json: No space left on device; \d+ MiB are free .* make room"
    with pytest.raises(StageFailed, match=expected), readable_disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a.json"))


def test_the_error_gives_the_free_space_of_the_full_disk(tmp_path: Path) -> None:
    full = tmp_path / "tmp"
    full.mkdir()
    expected = rf"MiB are free in {full};"
    with (
        pytest.raises(StageFailed, match=expected),
        readable_disk_errors(tmp_path / "not" / "made"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", str(full / "compress-run-1"))


def test_a_forbidden_out_is_a_wrong_argument(tmp_path: Path) -> None:
    with (
        pytest.raises(PipelineInvalid, match=r"cannot be written .*--out"),
        readable_disk_errors(tmp_path),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "report.json"))
    with (
        pytest.raises(StageFailed, match="Permission denied"),
        readable_disk_errors(tmp_path / "out"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "elsewhere"))


def test_a_report_that_cannot_be_written_on_a_rerun_is_one_line(project, monkeypatch) -> None:
    def full(self: Report, out: Path, page: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(out / "report.json"))

    monkeypatch.setattr(Report, "write", full)
    with pytest.raises(StageFailed, match=r"report\.json: No space left on device; \d+ MiB"):
        project.run()
