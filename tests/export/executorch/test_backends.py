"""Programs with parts for a backend that the exporter does not use: refused before they load."""

import pytest

from benchmarks.attack import cases_folders
from compress.common.errors import ArtifactInvalid
from compress.export.executorch.runtime import ExecuTorchProgram, refuse_other_backends


def test_a_part_for_a_backend_that_loads_libraries_is_refused(tmp_path) -> None:
    made = cases_folders.executorch_with_a_part_for_another_backend(tmp_path)
    with pytest.raises(ArtifactInvalid, match="has parts for QnnBackend, which may load other"):
        ExecuTorchProgram(made / "model.pte", threads=1)


def test_a_part_for_xnnpack_is_taken(tmp_path) -> None:
    (tmp_path / "model.pte").write_bytes(cases_folders._program_for("XnnpackBackend"))
    refuse_other_backends(tmp_path / "model.pte")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"ET12" * 3])
def test_what_is_no_program_is_refused_in_a_line(tmp_path, content) -> None:
    (tmp_path / "model.pte").write_bytes(content)
    with pytest.raises(ArtifactInvalid, match=r"model\.pte: not an ExecuTorch") as refused:
        ExecuTorchProgram(tmp_path / "model.pte", threads=1)
    assert "\n" not in str(refused.value)
