"""Requests that are answered together get what they get alone, and are joined only then."""

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from compress.artifacts.artifact import Artifact
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import ArtifactInvalid
from compress.common.sealed_json import write_report
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import LabelAgreement
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.serve.http.dynamic_batcher import Batcher
from compress.serve.http.inference import load_inference
from compress.serve.http.loaded_model import ServedModel, open_model
from compress.serve.http.options import Options
from compress.serve.http.shared_state import SharedState
from compress.serve.packaging.model_interface import NO_REPORT, read_recorded
from compress.serve.repository import PackageKServe, PackageTriton
from compress.serve.torchserve.mar_file import read_mar
from compress.serve.torchserve.stage import PackageTorchServe
from tests.forging import forge_report
from tests.serve import text_nets
from tests.serve.text_nets import RARE, TOKENS, texts

HERE = Path(__file__).parent
SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="ids", shape=("batch", "length"), dtype="int64"),
        TensorSpec(name="mask", shape=("batch", "length"), dtype="int64"),
    ),
    outputs=(OutputSpec(name="logits"),),
)
MOVED = 1e-4
"""A logit that moves further has changed; kernels of another batch size round by 1e-6."""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    splits = Splits(text_nets.data(), input_names=("ids", "mask"))
    return Context(root=tmp_path_factory.mktemp("joined") / "source", data=splits)


@pytest.fixture(scope="module")
def models(context: Context) -> dict[str, OnnxModel]:
    """Return the classifier with activations ranged by the call, by the row, and in floats."""
    recipe = Recipe(factory="text_nets:Classifier")
    source = import_checkpoint(context.root, recipe, SIGNATURE, checkpoint=None, folder=HERE)
    made: dict[str, Any] = {"float": source}
    for name in ("tensor", "row"):
        stage = QuantizeDynamic.model_validate({"activation_range": name})
        made[name] = stage(source, context.with_root(context.root.with_name(f"{name}-graph")))
    return {
        name: ExportOnnx()(model, context.with_root(context.root.with_name(f"{name}-onnx")))
        for name, model in made.items()
    }


def changed(served: ServedModel, requests: int, *, joined: bool) -> tuple[int, int]:
    """Return how many answers differ from those alone, and in how many calls all were given.

    Every other request is hostile: rare tokens, whose activations are far larger.
    """
    real, hostile = (texts(requests // 2, *tokens, 3) for tokens in ((0, RARE), (RARE, TOKENS)))
    rows = [row for pair in zip(real, hostile, strict=True) for row in pair]
    sent = [[row["ids"][None].numpy(), row["mask"][None].numpy()] for row in rows]
    alone = [np.asarray(served.call(*arrays)[0]) for arrays in sent]
    calls = []

    def call(*arrays: np.ndarray) -> Any:
        calls.append(len(arrays[0]))
        return served.call(*arrays)

    async def ask() -> list[np.ndarray]:
        batcher = Batcher(call, max_rows=16, joins_rows=joined, delay_seconds=0.05)
        answers = await asyncio.gather(*(batcher.outputs(arrays) for arrays in sent))
        batcher.close()
        return [np.asarray(outputs[0]) for outputs in answers]

    found = asyncio.run(ask())
    moved = sum(np.abs(a - b).max() > MOVED for a, b in zip(alone, found, strict=True))
    return int(moved), len(calls)


def report_on(folder: Path, model: Artifact, context: Context) -> Path:
    """Write what a run's report says of an artifact."""
    dependence = context.batch_dependence(model).model_dump(mode="json")
    stage = {
        "artifact": {"digest": model.digest},
        "measurements": {"batch_dependence": dependence},
    }
    file = folder / "report.json"
    write_report(file, {"stages": [stage]}, {})
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "row", "float"])
def test_no_answer_of_the_built_in_server_changes_beside_hostile_requests(
    name: str, models: dict[str, OnnxModel], context: Context, tmp_path: Path
) -> None:
    report = report_on(tmp_path, models[name], context)
    with open_model(models[name], "text", 1, report) as served:
        assert ("depend on what else is in the batch" in served.not_joined) == (name == "tensor")
        moved, calls = changed(served, 400, joined=not served.not_joined)
        assert moved == 0
        assert calls == 400 if name == "tensor" else calls < 200
        # What is refused would have changed answers.
        assert (changed(served, 400, joined=True)[0] > 100) == (name == "tensor")


@pytest.mark.slow
def test_nothing_is_joined_that_no_report_speaks_for(
    models: dict[str, OnnxModel], context: Context, tmp_path: Path
) -> None:
    with open_model(models["row"], "text", 1) as served:
        assert served.not_joined == NO_REPORT
    report = report_on(tmp_path, models["tensor"], context)
    with (
        pytest.raises(ArtifactInvalid, match="says nothing of"),
        open_model(models["row"], "text", 1, report),
    ):
        pass
    report.write_text("{")
    with (
        pytest.raises(ArtifactInvalid, match="is not as it was written"),
        open_model(models["row"], "text", 1, report),
    ):
        pass


@pytest.mark.slow
def test_a_report_that_was_edited_or_is_no_file_lets_nothing_join(
    models: dict[str, OnnxModel], context: Context, tmp_path: Path
) -> None:
    report = report_on(tmp_path, models["row"], context)
    assert read_recorded(models["row"], report).batch_dependence
    (tmp_path / "lock.json").write_text('{"edited": 1}')
    with pytest.raises(ArtifactInvalid, match=r"lock\.json: is not as the run wrote it"):
        read_recorded(models["row"], report)
    (tmp_path / "lock.json").unlink()
    assert read_recorded(models["row"], report).batch_dependence
    report.write_text(report.read_text().replace(models["row"].digest, "0" * 64))
    with pytest.raises(ArtifactInvalid, match=r"report\.json: is not as it was written"):
        read_recorded(models["row"], report)
    report.unlink()
    os.mkfifo(report)  # opening it waits for a writer
    with pytest.raises(ArtifactInvalid, match="pipe"):
        read_recorded(models["row"], report)


@pytest.mark.slow
def test_a_report_is_not_believed_where_this_machine_shows_otherwise(
    models: dict[str, OnnxModel], context: Context, tmp_path: Path
) -> None:
    """Seeded texts of the tokens 0 and 1 show it as well, where a mask hides one of them."""
    forged = report_on(tmp_path, models["row"], context)

    def rename(report, lock) -> None:
        report["stages"][0]["artifact"]["digest"] = models["tensor"].digest

    forge_report(tmp_path, rename)
    with open_model(models["tensor"], "text", 1, forged) as served:
        assert served.not_joined.startswith("answers depend")


@pytest.mark.slow
def test_the_report_of_the_runs_folder_is_found(
    models: dict[str, OnnxModel], context: Context, tmp_path: Path
) -> None:
    place = shutil.copytree(models["row"].path, tmp_path / "artifacts" / "onnx")
    report_on(tmp_path, models["row"], context)
    with open_model(OnnxModel.from_directory(place), "text", 1) as served:
        assert served.not_joined == ""


@pytest.mark.slow
def test_why_requests_are_not_joined_is_logged_in_one_line(
    models: dict[str, OnnxModel], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        opened = open_model(models["float"], "text", 1)
        load_inference(opened, "1", Options(), SharedState(Options().limits, "t"))
    assert caplog.messages == [f"note: requests are not joined: {NO_REPORT}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "row"])
def test_every_package_takes_the_same_decision(
    name: str, models: dict[str, OnnxModel], context: Context, tmp_path: Path
) -> None:
    gates = {"gates": (LabelAgreement(minimum=0.0),)}
    triton = PackageTriton(**gates).run(models[name], context.with_root(tmp_path / "triton"))
    kserve = PackageKServe(storage_uri="s3://bucket/models", **gates).run(
        triton, context.with_root(tmp_path / "kserve")
    )
    config = (triton.path / "model" / "config.pbtxt").read_text()
    assert ("dynamic_batching" in config) == (name == "row")
    assert (kserve.path / "model_repository/model/config.pbtxt").read_text() == config
    warnings = str(triton.manifest.facts["warnings"])
    assert ("requests are not joined: answers depend" in warnings) == (name == "tensor")
    assert ("--disable-auto-complete-config" in warnings) == (name == "tensor")


@pytest.mark.slow
@pytest.mark.torchserve
@pytest.mark.parametrize("name", ["tensor", "row"])
def test_an_archive_is_packed_for_joining_only_where_rows_are_independent(
    name: str, models: dict[str, OnnxModel], context: Context, tmp_path: Path
) -> None:
    stage = PackageTorchServe(batch_size=8)
    archive = stage.run(models[name], context.with_root(tmp_path / "mar"))
    config = yaml.safe_load(read_mar(archive.payload_path)["model-config.yaml"])
    assert config["batchSize"] == (8 if name == "row" else 1)
    assert config["handler"]["joins_rows"] is (name == "row")
    warnings = archive.manifest.facts.get("warnings", [])
    if name == "row":
        assert warnings == []
    else:
        assert "batch_size is 1, not 8: answers depend" in str(warnings)
    # Without data nothing is proven, and the same model is packed for single requests.
    blind = stage.run(models[name], Context(root=tmp_path / "blind"))
    config = yaml.safe_load(read_mar(blind.payload_path)["model-config.yaml"])
    assert config["batchSize"] == 1 and config["handler"]["joins_rows"] is False
