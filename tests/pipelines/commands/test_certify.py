"""`compress certify` judges an artifact's answers again, on data and with gates that are new."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import compress
from compress.common.errors import ArtifactInvalid, GateRefused, PipelineInvalid
from compress.pipelines import Pipeline
from compress.pipelines.commands.verify import VerifierInputs, verify_command
from compress.pipelines.results.comparison import compare
from tests.forging import forge
from tests.pipelines.commands.test_verify_anchors import make_keys

NEW = """
import torch
from torch.utils.data import TensorDataset

def new(rows=300, noise=0.3):
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(rows) % 3
    x = noise * torch.randn(rows, 4, generator=generator) + 3 * torch.eye(4)[y]
    return {"val": TensorDataset(x, y)}

def unlike():
    return new(noise=30.0)
"""
BOUND = "{gate: max_disagreement, percent: 5, against: train}"


@pytest.fixture
def onnx(project) -> Path:
    """Return the ONNX artifact of a finished run; its file has got a gate and a factory since."""
    project.run()  # whose records name the file in its folder; all is in the store
    (project.folder / "new_clouds.py").write_text(NEW)
    project.edit("atol: 1e-4}", f"atol: 1e-4}}, {BOUND}")
    return project.out / "artifacts" / "export_onnx"


def test_gates_that_the_file_has_now_are_judged_on_new_data(onnx: Path, project) -> None:
    before = {file: file.stat().st_mtime_ns for file in project.folder.rglob("*.json")}
    found = compress.certify(onnx, data="new_clouds:new").certificate
    assert [v.gate for v in found.verdicts] == ["parity", "max_disagreement"]
    bound = found.verdicts[1].bound
    assert bound is not None
    assert (bound.samples, found.verdicts[1].against) == (300, "train")
    own = compress.certify(onnx.parent / "prune_channels").certificate
    assert own.data == json.loads((project.out / "lock.json").read_text())["data"]
    assert own.data != found.data
    assert before == {file: file.stat().st_mtime_ns for file in project.folder.rglob("*.json")}


def test_a_refusal_writes_no_attestation(onnx: Path, tmp_path: Path) -> None:
    with pytest.raises(GateRefused, match=r"export_onnx: max_disagreement .* samples changed"):
        compress.certify(onnx, data="new_clouds:unlike", attest=tmp_path / "made.json")
    assert not (tmp_path / "made.json").exists()


def test_a_signed_certificate_is_what_verify_shows_and_diff_compares(
    onnx: Path, tmp_path: Path
) -> None:
    key, public = make_keys(tmp_path / "key.pem")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    verify_command(onnx, attest=first)
    compress.certify(onnx, data="new_clouds:new", attest=second, sign_key=key)
    proof = verify_command(onnx, VerifierInputs(attestation=second, key=public))
    lines = [line for line in proof.proven if line.startswith("certified: second.json, signed by")]
    # What the run judged, then what was judged on the new data.
    parity, bound = "parity against prune_channels", "max_disagreement against train"
    assert [line.split(": ")[2] for line in lines] == [parity, parity, bound]
    assert "0 of 300 samples changed" in lines[-1]
    unsigned = verify_command(onnx, VerifierInputs(attestation=second))
    assert not any("max_disagreement" in line for line in unsigned.proven)
    assert any("max_disagreement" in line for line in unsigned.unproven)
    found = compare(first, second)
    assert [d.what for d in found.asked] == ["certificate 2.data"]
    assert found.found[-1].after == "passed, at most 0.9936"
    # The samples are as good as another's word.
    second.write_text(second.read_text().replace("payload", "payloads"))
    with pytest.raises(ArtifactInvalid):
        compare(first, second)


def test_a_refused_verdict_is_not_proven(project, tmp_path: Path) -> None:
    project.edit("atol: 1e-4}", "atol: 1e-4}, {gate: max_size, ratio: 0.001}")
    with pytest.raises(GateRefused):
        project.run()
    onnx, (key, public) = project.out / "artifacts" / "export_onnx", make_keys(tmp_path / "k.pem")
    verify_command(onnx, attest=tmp_path / "made.json", sign_key=key)
    given = VerifierInputs(attestation=tmp_path / "made.json", key=public)
    proof = verify_command(onnx, given)
    assert not any("max_size" in line for line in proof.proven)
    assert any("max_size" in line for line in proof.unproven)


@pytest.mark.parametrize(
    ("stage", "options", "wrong"),
    [
        (
            "train",
            {},
            r"small.yaml:7: stages\[0\]: train has no gate .* max_disagreement, percent: 1}$",
        ),
        ("export_onnx", {"on": ["cray"]}, r"there is no device 'cray'"),
        ("export_onnx", {"data": "nets:nothing"}, r"data.factory: .*nothing"),
        ("export_onnx", {"sign_key": "key.pem"}, r"--sign-key: .* give --attest FILE"),
        ("export_onnx", {"attest": "nowhere/made.json"}, r"nowhere is not a directory"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    project, stage: str, options: dict[str, str], wrong: str
) -> None:
    project.run()
    with pytest.raises(PipelineInvalid, match=wrong):
        compress.certify(project.out / "artifacts" / stage, **options)


def test_an_artifact_that_is_not_the_runs_is_refused(onnx: Path, tmp_path: Path) -> None:
    shutil.copytree(onnx, tmp_path / "alone")
    with pytest.raises(PipelineInvalid, match=r"expected an artifact in the folder of its run"):
        compress.certify(tmp_path / "alone")
    forge(onnx, "model.onnx", (onnx / "model.onnx").read_bytes() + b"\0")
    with pytest.raises(ArtifactInvalid, match=r"it is not the artifact"):
        compress.certify(onnx)


def test_new_files_are_read_as_the_old_ones_and_judged_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def table(name: str, labels: list[str]) -> None:
        rows = [(3.0 * np.eye(2)["ab".index(y)] + 0.3 * rng.standard_normal(2), y) for y in labels]
        lines = [f"{x[0]},{x[1]},{y}" for x, y in rows]
        (tmp_path / name).write_text("\n".join(["one,two,kind", *lines]))

    table("old.csv", ["a", "b"] * 60)
    table("new.csv", ["b"] * 40)  # which would be the first class by itself
    content = {
        "version": 1,
        "model": {
            "factory": "torch.nn:Linear",
            "arguments": {"in_features": 2, "out_features": 2},
            "inputs": [{"name": "input", "shape": ["batch", 2]}],
        },
        "data": {"table": "old.csv", "label": "kind", "split": {"val": 0.5}},
        "metric": "accuracy",
        "stages": [
            {"stage": "train", "epochs": 20, "batch_size": 10},
            {"stage": "export_torchscript", "gates": [{"gate": "min_metric", "at": 0.9}]},
        ],
    }
    (tmp_path / "p.yaml").write_text(json.dumps(content))
    Pipeline.from_yaml(tmp_path / "p.yaml").run(tmp_path / "out")
    artifact = tmp_path / "out" / "artifacts" / "export_torchscript"
    (verdict,) = compress.certify(artifact, data=str(tmp_path / "new.csv")).certificate.verdicts
    assert verdict.uncertainty is not None
    assert (verdict.value, verdict.uncertainty.samples) == (1.0, 40)
