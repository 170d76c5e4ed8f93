"""`compress bench`: the same model in several runtimes; no test asserts which one is faster."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper

import compress
from compress import cli
from compress.common.errors import PipelineInvalid
from compress.common.requirements import COMPILER, Requirement
from compress.pipelines.bench import Bench, bench_page, cells_of
from compress.profiling import quantiles
from compress.profiling.quantiles import Interval

X = torch.zeros(2, 4)
BRIEF = {"example_inputs": X, "seconds": 0.001}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    model = torch.nn.Linear(4, 3)
    compress.export_onnx(model, example_inputs=X, out=folder / "onnx")
    compress.export_torchscript(model, example_inputs=X, out=folder / "torchscript")
    compress.export_onnx(torch.nn.Linear(5, 3), example_inputs=torch.zeros(2, 5), out=folder / "5")
    return folder


@pytest.mark.slow
def test_a_module_is_measured_in_each_runtime_that_takes_it() -> None:
    model = torch.nn.Linear(4, 3)
    found = compress.bench(model, runtimes=["torchscript", "onnx"], batch=[1, 8], **BRIEF)
    assert [model.kind for model in found.models] == ["eager", "onnx", "torchscript"]
    assert [(cell.batch, cell.threads) for cell in found.cells] == [(1, 1), (8, 1)]
    for cell in found.cells:
        assert [row.model for row in cell.rows] == [model.name for model in found.models]
        assert cell.rows[0].speedup == 1
        for row in cell.rows:
            assert row.latency.batch == cell.batch
            assert row.rows_per_second == pytest.approx(1000 * cell.batch / row.latency.p50)
        assert set(cell.fastest) <= {model.name for model in found.models}
    page = bench_page(found)
    assert all(cell.verdict in page for cell in found.cells)
    assert page.count('<th scope="row">') == 3 * 2 + 3
    assert "Throughput against latency, 1 thread" in page


def test_a_model_of_one_batch_size_is_measured_at_that(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "net.onnx")
    found = compress.bench(tmp_path / "net.onnx", seconds=0.001)
    assert [cell.batch for cell in found.cells] == [3]


def test_what_cannot_be_exported_here_is_named(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compress.bench(exported / "onnx", runtimes=["onnx", "torchscript"], **BRIEF)
    assert [model.name for model in found.models] == ["onnx"]
    reason = "export_torchscript reads eager or graph, and the model is onnx"
    assert found.not_exported == {"torchscript": reason}
    assert f"torchscript was not measured: {reason}" in found.lines()
    monkeypatch.setattr(Requirement, "missing", lambda need: need is COMPILER)
    found = compress.bench(torch.nn.Linear(4, 3), runtimes=["aot"], **BRIEF)
    assert found.not_exported == {
        "aot": f"export_aot: needs {COMPILER.what}, which is not installed; {COMPILER.install}"
    }


def test_a_figure_that_is_too_uncertain_is_not_shown_and_decides_nothing(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantiles, "WIDEST", 0.0)
    (cell,) = compress.bench(exported / "onnx", batch=[1], **BRIEF).cells
    assert cell.verdict == "batch 1, 1 thread: not measurable on this machine now"
    assert cells_of(cell.rows[0])[1:] == ("n/m", "", "", "", "")


def test_the_verdict_names_the_fastest_or_those_that_are_level(exported: Path) -> None:
    (cell,) = compress.bench(exported / "onnx", batch=[1], threads=[2], **BRIEF).cells
    one, both = (cell.model_copy(update={"fastest": names}) for names in (("a",), ("a", "b")))
    assert one.verdict == "batch 1, 2 threads: a is fastest"
    assert both.verdict == "batch 1, 2 threads: a and b are level"
    row = cell.rows[0].model_copy(
        update={"speedup": 3.456, "speedup_interval": Interval(3, 4), "unreliable_reason": ""}
    )
    assert cells_of(row)[4:] == ("3.46×", "3 – 4")


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        ([], {}, "models: found none"),
        (["onnx", "torchscript"], {"runtimes": ["aot"]}, "runtimes: exports one model, and 2"),
        (["onnx"], {"runtimes": ["tflite"]}, "'tflite' is unknown; expected some of onnx,"),
        (["onnx"], {"batch": [0]}, r"batch: found \[0\], expected numbers from 1"),
        (["onnx", "onnx"], {}, "given twice"),
        (["onnx", "5"], {}, r"5 takes float32 \[\*, 5\], and onnx takes float32 \[\*, 4\]"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    models: list[str], settings: dict[str, object], message: str, exported: Path
) -> None:
    with pytest.raises(PipelineInvalid, match=message):
        compress.bench(*(exported / name for name in models), **settings)


def test_the_command_prints_json_and_writes_the_page(
    exported: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "bench.html"
    arguments = [
        "bench",
        str(exported / "onnx"),
        str(exported / "torchscript"),
        "--seconds",
        "0.01",
    ]
    with pytest.raises(SystemExit):
        cli.app([*arguments, "--batch", "1,2", "--html", str(page), "--json"])
    found = Bench.model_validate(json.loads(capfd.readouterr().out))
    assert [(cell.batch, len(cell.rows)) for cell in found.cells] == [(1, 2), (2, 2)]
    assert page.read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit) as end:
        cli.app([*arguments, "--batch", "1;8"])
    assert end.value.code == 2
    assert "--batch 1;8: expected numbers with commas" in capfd.readouterr().err
