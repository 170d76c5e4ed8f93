"""The page and the refusals of the device `web`, without a browser."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.common.errors import PipelineInvalid, StageFailed, Unavailable
from compress.export.web import page as page_module
from compress.export.web.device import CHROMIUM
from compress.export.web.page import ONNXRUNTIME_WEB, SCRIPT, WASM
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from tests.export.builders import NETWORKS

X = torch.zeros(2, 4)
PIPELINE = """
version: 1
code: {code}
model: {{factory: "networks:mlp", inputs: [{{name: image, shape: [batch, 1, 8, 8]}}]}}
stages:
  - {{stage: {stage}, gates: [{{gate: parity, atol: 0.001, on: web}}]}}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the names of onnxruntime-web's files."""
    folder = tmp_path / "onnxruntime-web"
    (folder / "dist").mkdir(parents=True)
    (folder / "package.json").write_text('{"name": "onnxruntime-web", "version": "1.2.3"}')
    for name in (SCRIPT, WASM):
        (folder / "dist" / name).write_text(f"content of {name}")
    monkeypatch.setenv(ONNXRUNTIME_WEB.variable, str(folder))
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    compress.export_onnx(torch.nn.Linear(4, 3), example_inputs=X, out=folder / "<onnx>")
    return folder / "<onnx>"


def bench(file: Path, *models: Any, **settings: Any) -> None:
    compress.bench(*models, batch=[2, 4], seconds=0.001, web=file, **settings)


def unpacked(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))


def test_the_page_holds_the_file_the_runtime_and_the_answers(
    exported: Path, package: Path, tmp_path: Path
) -> None:
    bench(tmp_path / "page.html", exported)
    page = (tmp_path / "page.html").read_text()
    assert "<title>&lt;onnx&gt; in this browser</title>" in page
    assert not re.search(r"https?://", page)  # nothing comes from elsewhere
    blocks = dict(re.findall(r'<script type="text/plain" id="(.+?)">(.+?)</script>', page))
    assert unpacked(blocks["script"]) == (package / "dist" / SCRIPT).read_bytes()
    assert unpacked(blocks["wasm"]) == (package / "dist" / WASM).read_bytes()
    assert unpacked(blocks["file-0"]) == (exported / "model.onnx").read_bytes()
    setup = json.loads(re.search(r'id="setup">(.+?)</script>', page)[1])
    assert setup["files"] == ["model.onnx"]
    assert setup["seconds"] == 0.001
    assert setup["facts"]["Runtime"] == "onnxruntime-web 1.2.3"
    assert [size["rows"] for size in setup["sizes"]] == [2, 4]
    largest = 0.0
    for size in setup["sizes"]:
        (batch,) = size["batches"]
        (x,), (y,) = (
            [
                torch.frombuffer(bytearray(unpacked(t["packed"])), dtype=torch.float32).view(
                    t["shape"]
                )
                for t in batch[key]
            ]
            for key in ("inputs", "outputs")
        )
        with compress.Artifact.from_directory(exported).open() as predict:
            assert torch.equal(y, predict(x)[0])
        assert len(x) == size["rows"]
        largest = max(largest, float(y.abs().max()))
    assert setup["atol"] == pytest.approx(0.01 * largest)


@pytest.mark.slow
def test_a_page_has_one_onnx_file(exported: Path, package: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineInvalid, match="web: expected one ONNX file, found none; "):
        bench(tmp_path / "page.html", torch.nn.Linear(4, 3), example_inputs=X)
    assert not (tmp_path / "page.html").exists()
    bench(tmp_path / "page.html", torch.nn.Linear(4, 3), example_inputs=X, runtimes=["onnx"])
    assert (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_a_package_without_its_files_and_a_large_model_are_refused(
    exported: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "dist" / WASM).unlink()
    with pytest.raises(StageFailed, match=f"{WASM}: No such file or directory; npm install "):
        bench(tmp_path / "page.html", exported)
    monkeypatch.setattr(page_module, "LARGEST_MODEL", 100)
    with pytest.raises(StageFailed, match="has 0 MiB, expected at most 0 MiB"):
        bench(tmp_path / "page.html", exported)


@pytest.mark.parametrize("content", ["", "[", "[]", "{}", '{"name": "onnxruntime-node"}'])
def test_a_folder_that_is_not_the_package_is_missing(package: Path, content: str) -> None:
    assert not ONNXRUNTIME_WEB.missing()
    (package / "package.json").write_text(content)
    assert ONNXRUNTIME_WEB.missing()
    assert ONNXRUNTIME_WEB.version() == ""


def plan(folder: Path, stage: str) -> None:
    file = folder / "p.yaml"
    file.write_text(PIPELINE.format(code=NETWORKS, stage=stage))
    build_plan(Pipeline.from_yaml(file))


def test_a_plan_is_refused_where_the_package_or_chromium_is_not(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(CHROMIUM), "missing", lambda need: need is CHROMIUM)
    with pytest.raises(Unavailable, match=r"parity.*chrom.*not installed; .*apt-get install"):
        plan(tmp_path, "export_onnx")
    monkeypatch.setattr(type(CHROMIUM), "missing", lambda need: False)
    plan(tmp_path, "export_onnx")
    monkeypatch.delenv(ONNXRUNTIME_WEB.variable)
    with pytest.raises(Unavailable, match=r"onnxruntime-web.*npm install .*ONNXRUNTIME_WEB"):
        plan(tmp_path, "export_onnx")
    with pytest.raises(Unavailable, match=r"onnxruntime-web.*npm install .*ONNXRUNTIME_WEB"):
        bench(tmp_path / "page.html", torch.nn.Linear(4, 3), example_inputs=X)
