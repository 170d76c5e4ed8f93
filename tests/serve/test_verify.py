"""Verifying an archive: any altered byte is named, and what was proven is written down."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import ArtifactInvalid
from compress.common.forward import OpenedModel
from compress.common.sealed_json import load_sealed, write_report
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.verdict import History, PastStage
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.pipelines import Pipeline
from compress.pipelines.commands.verify import VerifierInputs, load_evidence, verify_command
from compress.pipelines.runner.run import preview_run
from compress.serve.http.options import Options
from compress.serve.packaging.provenance import (
    Provenance,
    digest_of,
    model_card,
    refuse_broken_chain,
)
from compress.serve.serve_command import serve_artifacts
from compress.serve.torchserve import served_archive
from compress.serve.torchserve.artifact import TorchServeArchive
from compress.serve.torchserve.mar_file import read_mar, write_mar
from compress.serve.torchserve.stage import PackageTorchServe
from compress.serve.verify import compare_outputs, verify
from tests.pipelines.conftest import measured_briefly

pytestmark = pytest.mark.torchserve

ROOT = Path(__file__).parents[2]
PERCEPTRON = "from torch import nn\n\ndef mlp():\n    return nn.Sequential(nn.Linear(4, 3))\n"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    folder = tmp_path_factory.mktemp("exported")
    (folder / "perceptron.py").write_text(PERCEPTRON)
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="logits"),)
    )
    recipe = Recipe(factory="perceptron:mlp")
    source = import_checkpoint(folder / "source", recipe, signature, checkpoint=None, folder=folder)
    return ExportOnnx().run_checked(source, Context(root=folder / "onnx"))


@pytest.fixture
def archive(exported: OnnxModel, blobs: Splits, tmp_path: Path) -> TorchServeArchive:
    return PackageTorchServe().run(exported, Context(root=tmp_path / "mar", data=blobs))


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started = "compress.serve.torchserve.process.TorchServe.__enter__"
    monkeypatch.setattr(started, lambda _: pytest.fail("it was started"))
    loaded = "compress.serve.torchserve.served_archive.load_archive"
    monkeypatch.setattr(loaded, lambda *_: pytest.fail("it was loaded"))


@pytest.fixture
def without_java(archive: TorchServeArchive, hide_java: Callable[[], None]) -> None:
    """Take Java away, once the archive is packed."""
    hide_java()


def resealed(folder: Path, mar: Path) -> Path:
    """Make an artifact's manifest vouch for another archive, as a careful forger would."""
    target = shutil.copytree(folder, mar.with_suffix(""))
    (target / "model.mar").chmod(0o644)
    shutil.copy(mar, target / "model.mar")
    (target / "manifest.json").chmod(0o644)
    manifest = load_sealed((target / "manifest.json").read_bytes())
    manifest["files"]["model.mar"] = digest_of(mar).model_dump()
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def never_asked() -> None:
    raise AssertionError("the pipeline's code would have run before every hash was compared")


@pytest.mark.slow
@pytest.mark.usefixtures("never_started")
def test_a_changed_byte_in_any_member_is_refused_with_its_name(
    archive: TorchServeArchive, tmp_path: Path
) -> None:
    members = read_mar(archive.payload_path)
    assert len(members) == 7
    for i, (name, content) in enumerate(members.items()):
        for place in (0, len(content) // 2, len(content) - 1):
            flipped = bytearray(content)
            flipped[place] ^= 1
            write_mar(tmp_path / f"{i}-{place}.mar", members | {name: bytes(flipped)})
            mar = tmp_path / f"{i}-{place}.mar"
            for path in (mar, resealed(archive.path, mar)):
                with pytest.raises(ArtifactInvalid, match=name.replace(".", r"\.")):
                    verify(path, evidence=never_asked)


@pytest.mark.usefixtures("never_started")
def test_a_changed_byte_in_the_file_itself_is_refused_with_the_members_name(
    archive: TorchServeArchive, tmp_path: Path
) -> None:
    whole = archive.payload_path.read_bytes()
    for name, content in read_mar(archive.payload_path).items():
        damaged = bytearray(whole)
        damaged[whole.index(content) + len(content) // 2] ^= 1
        (tmp_path / "x.mar").write_bytes(damaged)
        with pytest.raises(ArtifactInvalid, match=name.replace(".", r"\.")):
            verify(tmp_path / "x.mar")


@pytest.mark.usefixtures("never_started")
def test_another_sha256_than_expected_is_refused(archive: TorchServeArchive) -> None:
    for path in (archive.path, archive.payload_path):
        with pytest.raises(ArtifactInvalid, match=r"sha256 is \w+, expected 00ff"):
            verify(path, sha256="00ff")


@pytest.mark.usefixtures("never_started")
def test_native_code_of_unknown_origin_is_not_run(
    archive: TorchServeArchive, tmp_path: Path
) -> None:
    members = read_mar(archive.payload_path)
    record = Provenance.read(members["provenance.json"], "it")
    native = record.artifact.model_copy(update={"kind": "aot"})
    config = members["model-config.yaml"].replace(b"kind: onnx", b"kind: aot")
    digests = record.members | {"model-config.yaml": digest_of(config)}
    record = record.model_copy(update={"artifact": native, "members": digests})
    changed = {"provenance.json": record.sealed(), "model-config.yaml": config}
    write_mar(tmp_path / "x.mar", members | changed)
    proof = verify(tmp_path / "x.mar")
    assert proof.served_by is None and not proof.replays
    assert "native code, which cannot be inspected, so it was not started" in proof.unproven[-1]
    with pytest.raises(
        ArtifactInvalid, match="native code, which cannot be inspected: give the archive's"
    ):
        serve_artifacts([tmp_path / "x.mar"], Options(port=0), None, print)
    folder = tmp_path / "forged"
    folder.mkdir()
    write_mar(folder / "model.mar", members | changed)
    manifest = archive.manifest.model_dump(mode="json")
    manifest["facts"]["provenance"] = digest_of(record.sealed()).sha256
    manifest["files"] = {"model.mar": digest_of(folder / "model.mar").model_dump()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "so it was not started" in verify(folder).unproven[-1]


@pytest.mark.usefixtures("never_started")
def test_files_that_cannot_be_served_or_verified_name_the_right_command(
    archive: TorchServeArchive, tmp_path: Path
) -> None:
    alone, named = tmp_path / "model.pt2", archive.path / "manifest.json"
    alone.write_bytes(b"PK")
    takes = "takes an artifact's directory, or a .mar"
    no_manifest = f"{takes}: no manifest.json beside it"
    with pytest.raises(ArtifactInvalid, match=f"compress verify {no_manifest}"):
        verify(alone)
    with pytest.raises(ArtifactInvalid, match=f"{takes}: run compress verify {archive.path}"):
        verify(named)
    with pytest.raises(ArtifactInvalid, match=f"{alone.name}: not a torch.export program"):
        serve_artifacts([alone], Options(port=0), None, print)
    with pytest.raises(ArtifactInvalid, match=r"expected the directory, or its model\.mar"):
        serve_artifacts([named], Options(port=0), None, print)
    with pytest.raises(ArtifactInvalid, match=r"sha256 is \w+, expected 00ff"):
        serve_artifacts([archive.path], Options(port=0, sha256="00ff"), None, print)


@pytest.mark.usefixtures("never_started")
def test_native_code_does_not_pass_for_another_kind(
    archive: TorchServeArchive, tmp_path: Path
) -> None:
    members = read_mar(archive.payload_path)
    record = Provenance.read(members["provenance.json"], "it")
    packed = members["model-config.yaml"]
    content = yaml.safe_load(packed)
    text = {"text": {"tokenizer": "/etc/tokenizer.json"}}
    for config, problem in (
        (packed.replace(b"kind: onnx", b"kind: aot"), "says that .* not started"),
        (_as_yaml({"handler": {"kind": "aot", "one_call_at_a_time": True}}), "says that .* not"),
        *((other, "is not as package_torchserve writes") for other in (b"[", b"x", packed + b"#")),
        (_as_yaml({"handler": {"text": "x"}}), "is not as package_torchserve writes"),
        (_as_yaml({**content, "parallelType": "custom"}), "parallelType: unknown entry"),
        (_as_yaml({"handler": content["handler"] | {"code": "x"}}), "code: unknown entry"),
        (_as_yaml({"handler": content["handler"] | text}), "text.tokenizer: '/etc/tokenizer.json'"),
    ):
        digests = record.members | {"model-config.yaml": digest_of(config)}
        sealed = record.model_copy(update={"members": digests}).sealed()
        changed = {"provenance.json": sealed, "model-config.yaml": config}
        write_mar(tmp_path / "x.mar", members | changed)
        with pytest.raises(ArtifactInvalid, match=rf"model-config\.yaml.*{problem}"):
            verify(tmp_path / "x.mar")


def _as_yaml(content: dict[str, Any]) -> bytes:
    return yaml.safe_dump(content, sort_keys=True).encode()


@pytest.mark.usefixtures("never_started")
def test_a_foreign_handler_under_a_forged_manifest_is_not_started(
    archive: TorchServeArchive, tmp_path: Path
) -> None:
    members = read_mar(archive.payload_path)
    record = Provenance.read(members["provenance.json"], "it")
    handler = b"import os\n" + members["handler.py"]
    digests = record.members | {"handler.py": digest_of(handler)}
    sealed = record.model_copy(update={"members": digests}).sealed()
    write_mar(tmp_path / "x.mar", members | {"handler.py": handler, "provenance.json": sealed})
    folder = resealed(archive.path, tmp_path / "x.mar")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["facts"]["provenance"] = digest_of(sealed).sha256
    (folder / "manifest.json").write_text(json.dumps(manifest))
    forged = TorchServeArchive.from_directory(folder)
    forged.verify()  # every file is the one that the forged manifest names
    starting: list[Any] = [
        lambda: verify(folder),
        lambda: forged.open().__enter__(),
    ]
    for start in starting:
        with pytest.raises(ArtifactInvalid, match=r"handler\.py is not the one that this version"):
            start()


@pytest.mark.usefixtures("without_java")
def test_without_java_the_loader_answers_and_the_proof_says_so(
    archive: TorchServeArchive, tmp_path: Path
) -> None:
    sha256 = archive.manifest.files["model.mar"].sha256
    proof = verify_command(
        archive.payload_path, VerifierInputs(sha256.upper()), report=tmp_path / "proof.json"
    )
    assert proof.served_by is not None and "without TorchServe" in proof.served_by
    assert [(r.what, r.samples) for r in proof.replays] == [("the recorded probe", 4)]
    assert proof.replays[0].largest_difference <= 1e-6
    assert [line.split(": ")[0] for line in proof.summary_lines()][-2:] == ["not proven"] * 2
    written = json.loads((tmp_path / "proof.json").read_text())
    assert written["sha256"] == sha256 and written["proven"] == list(proof.proven)


@pytest.mark.usefixtures("without_java")
def test_answers_that_differ_from_the_recorded_ones_are_refused(
    archive: TorchServeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = served_archive.load_archive

    @contextmanager
    def load_shifted(*given: Any) -> Iterator[Any]:
        with load(*given) as model:
            yield replace(model, call=lambda *inputs: [model.call(*inputs)[0] + 1])

    monkeypatch.setattr(served_archive, "load_archive", load_shifted)
    with pytest.raises(ArtifactInvalid, match=r"probe\.npz: the served answers differ by 1"):
        verify(archive.payload_path)


def test_outputs_of_another_shape_or_nan_differ_infinitely() -> None:
    one, infinite = np.ones((2, 3), np.float32), np.array([np.inf, 1])
    assert (
        compare_outputs("it", [([one], [one])], lambda _: (one[:1],)).largest_difference == np.inf
    )
    assert (
        compare_outputs("it", [([one], [one])], lambda _: (one * np.nan,)).largest_difference
        == np.inf
    )
    assert (
        compare_outputs("it", [([one], [infinite])], lambda _: (infinite,)).largest_difference == 0
    )


def record_of(archive: TorchServeArchive, exported: OnnxModel, **changed: Any) -> Provenance:
    (step,) = exported.manifest.lineage
    stage = PastStage(
        name="onnx",
        stage="export_onnx",
        input="source",
        settings=step.settings,
        kind="onnx",
        digest=exported.digest,
        bytes=7,
        parameters=15,
        macs=None,
        metric={"name": "accuracy", "split": "val", "value": 0.98765},
        verdicts=(),
    )
    stage = stage.model_copy(update=changed)
    history = History(
        pipeline="digits",
        seed=3,
        data=None,
        versions={"torch": "9.9"},
        source={"checkpoint": "c0ffee"},
        source_digest=step.inputs["input"],
        stages=(stage,),
    )
    record = Provenance.read(read_mar(archive.payload_path)["provenance.json"], "it")
    return record.model_copy(update={"history": history})


def test_a_chain_with_other_digests_is_refused(
    archive: TorchServeArchive, exported: OnnxModel
) -> None:
    refuse_broken_chain(record_of(archive, exported), "it")
    with pytest.raises(ArtifactInvalid, match="the last stage, onnx, made 12, and the packaged"):
        refuse_broken_chain(record_of(archive, exported, digest="12"), "it")
    with pytest.raises(ArtifactInvalid, match="stage onnx is recorded as train of"):
        refuse_broken_chain(record_of(archive, exported, stage="train"), "it")
    with pytest.raises(ArtifactInvalid, match="stage onnx is recorded as export_onnx of None"):
        refuse_broken_chain(record_of(archive, exported, input="nobody"), "it")


def test_the_model_card_holds_measured_facts_only(
    archive: TorchServeArchive, exported: OnnxModel
) -> None:
    text = model_card("digits", record_of(archive, exported), 1234)
    for fact in ("1234 bytes", "accuracy 0.9877 on val", "| seed | 3 |", "c0ffee", "torch | 9.9"):
        assert fact in text
    assert "| onnx | onnx | accuracy 0.9877 on val | 7 | 15 | – |" in text
    bare = read_mar(archive.payload_path)["MODEL_CARD.md"].decode()
    assert "It was packed outside a run" in bare and "accuracy" not in bare


PIPELINE = """\
version: 1
name: small
model:
  factory: models:ResNet
  arguments: {blocks: 1, width: 4, classes: 10}
  inputs: [{name: image, shape: [batch, 1, 8, 8]}]
  outputs: [{name: logits}]
data: {factory: "data:digits", batch_size: 120}
metric: accuracy
stages:
  - {name: onnx, stage: export_onnx, gates: [{gate: min_metric, at: 0.01}]}
  - {stage: package_torchserve, class_names: [a, b, c, d, e, f, g, h, i, j]}
"""


def open_packed(archive: TorchServeArchive, device: str = "cpu", threads: int = 1) -> OpenedModel:
    """Open the model that an archive in a run's store holds, without Java."""
    packed = archive.manifest.lineage[-1].inputs["input"]
    store = archive.path.parents[1]
    files = (
        file for depth in ("*", ".store/*") for file in store.glob(f"{depth}/artifact/model.onnx")
    )
    found = (OnnxModel.from_directory(file.parent) for file in files)
    return next(model for model in found if model.digest == packed).open(device, threads)


@pytest.mark.slow
def test_a_run_leaves_what_its_archive_is_proven_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mars = []
    for name in ("one", "two"):
        folder = tmp_path / name / "pipeline"
        shutil.copytree(ROOT / "examples" / "digits", folder)
        (folder / "small.yaml").write_text(PIPELINE)
        pipeline = Pipeline.from_yaml(folder / "small.yaml")
        with measured_briefly(), pytest.MonkeyPatch.context() as patch:
            # It is the bytes that matter here; the run of the tutorial is judged by TorchServe.
            patch.setattr(TorchServeArchive, "open", open_packed)
            report = pipeline.run(tmp_path / name / "out")
        mars.append(tmp_path / name / "out" / "artifacts" / "package_torchserve" / "model.mar")
        assert report.stages[-1].artifact.sha256 == digest_of(mars[-1]).sha256
    assert mars[0].read_bytes() == mars[1].read_bytes()
    assert str(tmp_path).encode() not in mars[0].read_bytes()
    out = mars[0].parents[2]
    assert set(preview_run(pipeline, tmp_path / "two" / "out").values()) == {"cached"}

    monkeypatch.setenv("PATH", str(tmp_path))
    proof = verify_command(mars[0].parent, replay=True)
    assert [(r.what, r.samples) for r in proof.replays] == [
        ("the recorded probe", 4),
        ("the validation split", 360),
    ]
    assert "2 of these 2 artifacts are here, as sealed" in proof.proven
    assert "the source's code hash to what is recorded" in proof.proven
    text = read_mar(mars[0])["MODEL_CARD.md"].decode()
    value = report.stages[0].measurements.metric
    assert value is not None and f"accuracy {value.value:.4f} on val" in text
    assert "| onnx | metric >= 0.01 |" in text

    onnx = out / "artifacts" / "onnx" / "model.onnx"
    onnx.unlink()
    onnx.write_bytes(b"other")
    with pytest.raises(ArtifactInvalid, match=r"model\.onnx is not the file that was sealed"):
        verify_command(mars[0].parent, replay=True)
    shutil.rmtree(onnx.parent)
    code = tmp_path / "one" / "pipeline" / "models.py"
    code.write_text(code.read_text() + "\n# changed\n")
    with pytest.raises(ArtifactInvalid, match="the code of the input model was"):
        verify_command(mars[0].parent, replay=True)
    shutil.rmtree(code.parent)
    monkeypatch.setattr(TorchServeArchive, "open", open_packed)
    proof = verify_command(mars[0].parent, replay=True)
    found, split = proof.unproven
    assert found == "onnx: not here" and "validation split: PipelineInvalid" in split


def test_an_artifact_outside_a_run_has_no_evidence(archive: TorchServeArchive) -> None:
    for path in (archive.path, archive.payload_path):
        assert load_evidence(path, replay=True) is None


@pytest.mark.slow
def test_code_that_a_foreign_folder_names_runs_only_where_it_is_asked_for(
    archive: TorchServeArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "artifacts" / "mar"
    shutil.copytree(archive.path, folder)
    (tmp_path / "planted.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "version: 1\nname: foreign\n"
        "model: {factory: 'planted:net', inputs: [{name: x, shape: [batch, 4]}]}\n"
        "data: {factory: 'planted:data'}\nmetric: accuracy\nstages: [{stage: export_onnx}]\n"
    )
    lock = {"file": str(file), "artifacts": {"mar": archive.digest}}
    row = {"name": "mar", "input": "onnx", "artifact": {"digest": archive.digest}}
    write_report(tmp_path / "run" / "report.json", {"stages": [row]}, lock)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    proof = verify_command(folder)
    assert not (tmp_path / "ran").exists()
    assert "--replay does both, and runs the code" in proof.unproven[-1]
    verify_command(folder, replay=True)
    assert (tmp_path / "ran").exists()
