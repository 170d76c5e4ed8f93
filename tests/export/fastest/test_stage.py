"""`export_fastest`: what it keeps, for figures that the test gives; none asserts a time."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.requirements import Requirement
from compress.core.context import Context
from compress.export.fastest import stage as measure
from compress.export.fastest.stage import ExportFastest
from compress.export.onnx.stage import ExportOnnx
from compress.export.openvino.stage import OPENVINO
from compress.profiling import quantiles


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.compare_latencies, "__defaults__", (0.001,))
    monkeypatch.setattr(measure.measure_fastest, "__defaults__", (0.001,))


def given_fastest(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let measuring come to a result, whatever the times were."""
    measured = measure.measure_fastest

    def changed(*arguments: object) -> list[measure.BenchCell]:
        return [c.model_copy(update={"fastest": names}) for c in measured(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "measure_fastest", changed)


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize(
    ("fastest", "kept", "verdict"),
    [
        (("torchscript",), "torchscript", "in torchscript (faster than onnx and openvino)"),
        (("openvino", "onnx"), "onnx", "in onnx (level with openvino, faster than torchscript)"),
    ],
)
def test_the_fastest_file_is_kept_and_answers(
    mlp: EagerModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fastest: tuple[str, ...],
    kept: str,
    verdict: str,
) -> None:
    given_fastest(monkeypatch, *fastest)
    context = Context(root=tmp_path / "kept")
    stage = ExportFastest(runtimes=("onnx", "openvino", "torchscript"), batch=2, threads=1)
    artifact = stage(mlp, context)
    assert artifact.kind == kept
    facts = artifact.manifest.facts["fastest"]
    assert (facts["kept"], facts["verdict"], facts["batch"]) == (kept, verdict, 2)
    assert [row["model"] for row in facts["rows"]] == ["onnx", "openvino", "torchscript"]
    assert artifact.manifest.lineage[-1].stage == "export_fastest"
    Artifact.from_directory(tmp_path / "kept").verify()
    stage.check_parity(mlp, artifact, context)
    if kept == "onnx":
        alone = ExportOnnx()(mlp, Context(root=tmp_path / "alone"))
        assert artifact.payload_path.read_bytes() == alone.payload_path.read_bytes()


@pytest.mark.usefixtures("briefly")
def test_runtimes_that_are_not_here_are_left_out(
    mlp: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Requirement, "missing", lambda need: need is OPENVINO)
    stage = ExportFastest(runtimes=("openvino", "onnx"))
    artifact = stage(mlp, Context(root=tmp_path / "kept"))
    assert artifact.kind == "onnx"
    warning, *_ = artifact.manifest.facts["warnings"]  # on a busy machine another follows
    assert warning.startswith(
        "openvino was not measured: export_openvino: needs openvino, which is not installed; pip"
    )
    with pytest.raises(StageFailed, match="no runtime takes the model; openvino: export_openvino"):
        ExportFastest(runtimes=("openvino",))(mlp, Context(root=tmp_path / "none"))


@pytest.mark.usefixtures("briefly")
def test_a_machine_too_busy_to_measure_keeps_the_first_and_says_so(
    mlp: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantiles, "WIDEST", 0.0)
    stage = ExportFastest(runtimes=("onnx", "openvino"))
    artifact = stage(mlp, Context(root=tmp_path / "kept"))
    assert artifact.kind == "onnx"
    (warning,) = artifact.manifest.facts["warnings"]
    assert warning.endswith("not measurable on this machine now; onnx is kept as the first")


@pytest.mark.parametrize("runtimes", [[], ["onnx", "onnx"], ["tflite"]])
def test_other_lists_of_runtimes_are_refused(runtimes: list[str]) -> None:
    with pytest.raises(ValidationError, match="runtimes"):
        ExportFastest(runtimes=runtimes)
