"""Answers compared with the uncompressed model's: alarms, what lasts, and what clients notice."""

import json
import os
import random
import re
import signal
import time
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

from compress import cli
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.sealed_json import write_sealed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.pipelines.commands.reference_rows import reference_rows
from compress.serve.shadow.comparison import Comparison, opened
from compress.serve.shadow.options import ShadowOptions
from compress.serve.shadow.state import DriftState, Subject, read_state
from tests.serve.served_here import Served, serving

PATIENCE = 60
"""Seconds until what a server does beside its requests is done, however busy the machine is."""
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="scores"),)
)
ALIKE, OTHERWISE = [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 2.0, 0.0]


def net(file: Path, weight: float, dtype: int = TensorProto.FLOAT) -> Path:
    """Write a file whose scores are x0 and x1 + weight * x2, so that a client decides on them."""
    matrix = np.array([[1, 0], [0, 1], [0, weight], [0, 0]], np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["floats", "matrix"], ["scores"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", dtype, ["batch", 4])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2])],
        [onnx.numpy_helper.from_array(matrix, "matrix")],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), file)
    return file


@pytest.fixture
def nets(tmp_path: Path) -> tuple[Path, Path]:
    """Return the served file, and another one to compare it with."""
    return net(tmp_path / "small.onnx", 0.0), net(tmp_path / "float.onnx", 1.0)


def shown(server: Served) -> dict[str, float]:
    """Return the shadow's metrics."""
    _, _, body = server.ask(method="GET", path="/metrics")
    found = re.findall(r"^compress_(\w+){.*} (\S+)$", body.decode(), re.M)
    return {name: float(value) for name, value in found}


def wait_until(reached: Any) -> Any:
    """Return what a function returns once that is true."""
    due = time.monotonic() + PATIENCE
    while not (found := reached()):
        assert time.monotonic() < due
        time.sleep(0.5)  # each look is a request, and takes a processor from what it waits for
    return found


def readiness(server: Served) -> int:
    return server.ask(method="GET", path="/v2/health/ready")[0]


def end(server: Served) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_another_answer_alarms_and_stays_until_the_state_is_deleted(
    nets: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    small, other = nets
    asked = ("--shadow", "100%", "--shadow-model", str(other), "--shadow-limit", "5%")
    asked += ("--shadow-readiness",)
    state = small.with_name("small.onnx.shadow.json")
    with serving(small, *asked) as server:
        for _ in range(40):
            assert server.rows(ALIKE, ALIKE)[0] == 200
        wait_until(lambda: shown(server)["shadow_compared"] == 40)
        assert shown(server) | {"shadow_other": 0, "certificate_broken": 0} == shown(server)
        assert readiness(server) == 200
        for _ in range(20):
            status, answer = server.rows(OTHERWISE)
            assert status == 200
            assert answer["outputs"][0]["data"] == [1.0, 0.0], "the client gets the served answer"
        wait_until(lambda: shown(server)["certificate_broken"])
        assert readiness(server) == 503
        found = shown(server)
        assert found["shadow_evidence"] >= 20
        assert found["shadow_lower"] <= 100 * found["shadow_other"] / found["shadow_compared"]
        assert server.rows(OTHERWISE)[0] == 200, "it goes on answering"
        end(server)
    assert "certificate broken at " in capfd.readouterr().err
    with serving(small, *asked) as server:
        assert readiness(server) == 503
        assert shown(server)["shadow_requests"] > 40
        before = shown(server)["shadow_compared"]
        for _ in range(30):
            assert server.rows(ALIKE)[0] == 200
        end(server)
    assert read_state(state).compared == before + 30, "what waits at a stop is compared"
    page = small.with_name("page.html")
    with pytest.raises(SystemExit) as ended:
        cli.app(["monitor", str(state), "--json", "--html", str(page)])
    assert ended.value.code == 3
    assert json.loads(capfd.readouterr().out)["broken_at"]
    assert "<polyline" in page.read_text()


@pytest.mark.slow
def test_what_the_comparison_does_reaches_no_client(
    nets: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    small, other = nets
    asked = ("--shadow", "100%", "--shadow-model", str(other), "--shadow-limit", "5%")
    with serving(small, *asked, "--max-rows", "100000") as server:
        (process,) = psutil.Process(server.process.pid).children()
        assert process.nice() == 19
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        process.send_signal(signal.SIGSTOP)
        rows = np.zeros((50_000, 4), np.float32)
        head = {"inputs": [{"name": "x", "shape": [*rows.shape], "datatype": "FP32"}]}
        head["inputs"][0]["parameters"] = {"binary_data_size": rows.nbytes}
        text = json.dumps(head | {"parameters": {"binary_data_output": True}}).encode()
        sizes = {"Inference-Header-Content-Length": str(len(text))}
        while not shown(server)["shadow_dropped"]:
            assert server.ask(text + rows.tobytes(), sizes)[0] == 200
            assert shown(server)["shadow_requests"] < 60
        assert shown(server)["shadow_requests"] > 10, "some wait"
        process.kill()
        wait_until(lambda: not shown(server)["shadow_up"])
        assert server.rows(ALIKE)[0] == readiness(server) == 200
        end(server)
    assert "the process that compares answers has ended" in capfd.readouterr().err


def opened_for(
    small: Path, other: Path | None, percent: float | None = 5.0, digest: str = "0" * 64
) -> AbstractContextManager[Comparison]:
    """Open what a server's process would."""
    state = small.with_name("state.json")
    options = ShadowOptions(artifact=small, share=1.0, state=state, model=other, percent=percent)
    return opened(options, None, digest, SIGNATURE)


def compare(comparison: Comparison, *rows: list[float], row: int | None = None) -> None:
    """Compare the served net's answer to some rows."""
    x = np.array(rows, np.float32)
    comparison.compare([([x], [x[:, :2]], row)], joins_rows=False)


def test_the_drawn_row_is_compared_or_the_worst_and_failures_are_counted(nets, monkeypatch) -> None:
    monkeypatch.setattr("compress.serve.shadow.comparison.LOCK_SECONDS", 0.2)
    with opened_for(*nets) as comparison:
        compare(comparison, ALIKE, OTHERWISE, row=0)
        assert comparison.state.other == 0
        compare(comparison, ALIKE, OTHERWISE, row=1)
        compare(comparison, OTHERWISE, ALIKE)
        compare(comparison, ALIKE, ALIKE)
        assert (comparison.state.compared, comparison.state.other) == (4, 2)
        for inputs, outputs in (((1, 5), (1, 2)), ((1, 4), (1, 3, 2))):
            arrays = [np.zeros(inputs, np.float32)], [np.zeros(outputs, np.float32)]
            comparison.compare([(*arrays, 0)], joins_rows=False)
        assert (comparison.state.compared, comparison.state.failed) == (4, 2)
        assert comparison.error
        write_sealed(comparison.file, comparison.state)
        with pytest.raises(PipelineInvalid, match="another server writes it"):
            ExitStack().enter_context(opened_for(*nets))
    with opened_for(*nets) as comparison:
        assert (comparison.state.compared, comparison.state.other) == (4, 2), "it goes on"


def test_rows_of_one_shape_are_answered_in_one_call(nets) -> None:
    with opened_for(*nets) as comparison:
        calls, judge = [], comparison.judge

        def counting(arrays: list, served: list) -> Any:
            calls.append(len(arrays[0]))
            return judge(arrays, served)

        comparison.judge = counting
        rows = [ALIKE] * 7 + [OTHERWISE] * 3
        drawn: list = [([x], [x[:, :2]], 0) for x in np.array(rows, np.float32)[:, None]]
        comparison.compare(drawn, joins_rows=True)
        assert calls == [10]
        assert (comparison.state.compared, comparison.state.other) == (10, 3)
        # One that fails takes no other with it, and one of another shape is asked by itself.
        wrong = [np.zeros((1, 4), np.float32)], [np.zeros((1, 2, 2), np.float32)], 0
        comparison.judge = lambda arrays, served: (
            1 / 0 if len(served[0]) > 1 else judge(arrays, served)
        )
        comparison.compare([*drawn, wrong], joins_rows=True)
        assert (comparison.state.compared, comparison.state.other) == (20, 6)
        assert comparison.state.failed == 1
        comparison.judge, comparison.most_rows = counting, 4
        calls.clear()
        comparison.compare(drawn, joins_rows=True)
        comparison.compare(drawn[:2], joins_rows=False)
        assert calls == [4, 4, 2, 1, 1]


def quantized(file: Path) -> Path:
    """Write a file that rounds x to steps of .02 from -2.56 to 2.54, and scores x0 and x1."""
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["integers"]),
            helper.make_node("DequantizeLinear", ["integers", "scale", "zero"], ["rounded"]),
            helper.make_node("MatMul", ["rounded", "matrix"], ["scores"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2])],
        [
            onnx.numpy_helper.from_array(np.float32(0.02), "scale"),
            onnx.numpy_helper.from_array(np.int8(0), "zero"),
            onnx.numpy_helper.from_array(np.eye(4, 2, dtype=np.float32), "matrix"),
        ],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), file)
    return file


def normal_rows(count: int, spread: float = 1.0) -> np.ndarray:
    return (spread * np.random.default_rng(count).standard_normal((count, 4))).astype(np.float32)


def test_inputs_unlike_the_reference_rows_alarm_without_an_uncompressed_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small, rows = quantized(tmp_path / "small.onnx"), tmp_path / "rows.npz"
    np.savez(rows, x=normal_rows(1000))
    state, page = tmp_path / "state.json", tmp_path / "page.html"

    def opening() -> AbstractContextManager[Comparison]:
        options = ShadowOptions(artifact=small, share=1.0, state=state, reference=rows)
        return opened(options, None, "0" * 64, SIGNATURE)

    def ask(comparison: Comparison, count: int, spread: float) -> None:
        counts = {"requests": comparison.state.requests + 100 * count}
        comparison.state = comparison.state.model_copy(update=counts)
        drawn = [([x], [x[:, :2]], 0) for x in normal_rows(count, spread)[:, None]]
        comparison.compare(drawn, joins_rows=True)

    with opening() as comparison:
        shares = comparison.state.figures()["range_end_reference"]
        assert 0 < shares["x, largest"] < 0.02
        assert 0 < shares["x, smallest"] < 0.02
        ask(comparison, 300, 1.0)
        assert not comparison.state.alarm
        assert comparison.state.figures()["range_end"]["x, largest"] < 0.02
        write_sealed(comparison.file, comparison.state)
    with opening() as comparison:
        assert comparison.state.compared == 300, "it goes on"
        ask(comparison, 200, 4.0)
        assert comparison.state.alarm.startswith("inputs differ at 2")
        assert "certificate" not in comparison.state.alarm
        assert json.loads(json.dumps(comparison.state.figures()))["inputs_differ"]
        assert comparison.state.figures()["range_end"]["x, largest"] > 0.05
        comparison.compare([([x := normal_rows(2)], [x[:, :2]], None)], joins_rows=False)
        assert comparison.state.failed == 1, "rows alone are like the reference rows"
        write_sealed(comparison.file, comparison.state)
    with pytest.raises(SystemExit) as ended:
        cli.app(["monitor", str(state), "--html", str(page)])
    assert ended.value.code == 3
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("inputs like the reference rows: broken since ")
    worst = r"^x, (smallest|largest): .* % of the values, .* % of the reference rows'$"
    assert re.search(worst, lines[-2])
    assert "Evidence that scores of requests" in page.read_text()
    np.savez(rows, x=normal_rows(1001))
    with pytest.raises(ArtifactInvalid, match="is of reference"):
        opening().__enter__()
    for given, match in (
        ({"x": normal_rows(20)}, "rows.npz: has 20 rows, expected 100 or more"),
        ({"x": normal_rows(200)[:, :, None]}, r"x has shape .* expected \['batch', 4\]"),
        ({"y": normal_rows(200)}, r"the inputs are .*'y'.*, expected \['x'\]"),
    ):
        np.savez(rows, **given)
        with pytest.raises(PipelineInvalid, match=match):
            opening().__enter__()


def test_few_reference_rows_raise_no_false_alarms() -> None:
    rng, alarms = np.random.default_rng(0), 0
    random.seed(0)
    for _ in range(40):
        judged = rng.standard_normal(100)
        edges = np.quantile(judged[::2], np.linspace(0, 1, 17)[1:-1])
        bins = np.bincount(np.searchsorted(edges, judged[1::2]), minlength=17)
        state = DriftState(
            of=Subject(served="1", reference="2"),
            since="now",
            score="margin",
            edges=tuple(edges),
            bins=tuple(bins.tolist()),
            range_ends={},
        )
        for score in rng.standard_normal(400):
            state = state.after(score)
        alarms += bool(state.alarm)
    assert alarms <= 4


def test_a_state_is_shown_as_text_json_and_a_page(
    nets: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    state, page = nets[0].with_name("state.json"), nets[0].with_name("page.html")
    asked = ["monitor", str(state), "--html", str(page)]
    with opened_for(*nets) as comparison:
        for number in range(3):
            write_sealed(comparison.file, comparison.state)
            with pytest.raises(SystemExit) as ended:
                cli.app([*asked, "--json"] if number else asked)
            assert not ended.value.code, "it is not broken"
            comparison.state = comparison.state.model_copy(update={"requests": 100 * number + 100})
            compare(comparison, ALIKE)
    lines, *found = capfd.readouterr().out.split("{", 1)
    assert lines.startswith("at most 5 % other answers: not broken\nrequests since ")
    assert [json.loads("{" + part)["compared"] for part in found[0].split("\n{")] == [1, 2]
    assert "2 compared; lines end at the bounds" in page.read_text()


def test_reference_rows_are_those_of_a_pipelines_val(tmp_path: Path) -> None:
    net(tmp_path / "net.onnx", 0.0)
    val = normal_rows(2500)
    np.savez(tmp_path / "data.npz", x_train=normal_rows(64), x_val=val)
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(
        "version: 1\nmodel: {file: net.onnx}\ndata: {arrays: data.npz}\n"
        "stages: [{stage: package_triton}]\n"
    )
    with reference_rows(pipeline) as file, np.load(file) as rows:
        assert rows.files == ["x"]
        assert rows["x"].shape == (2000, 4)
        assert {*map(bytes, rows["x"])} <= {*map(bytes, val)}
    assert not file.exists()
    with reference_rows(file) as same:
        assert same == file, "others are as they were"
    pipeline.write_text(pipeline.read_text().replace("data: {arrays: data.npz}\n", ""))
    with pytest.raises(PipelineInvalid, match="yaml: there is no `val` in `data:`"):
        reference_rows(pipeline).__enter__()


def test_the_history_is_thinned_evenly(nets) -> None:
    with opened_for(*nets) as comparison:
        for number in range(1, 3001):
            counts = {"requests": 100 * number}
            comparison.state = comparison.state.model_copy(update=counts).after(0.0)
        history = comparison.state.history
        assert 64 <= len(history) <= 128
        assert {b[1] - a[1] for a, b in pairwise(history)} == {32}
        assert history[0] == (3200, 32, 0)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"digest": "1" * 64}, "is of served 0000"),
        ({"percent": 4.0}, "is of gate .*<= 5 %"),
        ({"other": 2.0}, "is of uncompressed"),
    ],
)
def test_a_state_of_something_else_is_refused(nets, changed: dict, match: str) -> None:
    small, other = nets
    with opened_for(*nets) as comparison:
        compare(comparison, ALIKE)
        write_sealed(comparison.file, comparison.state)
    before = (state := small.with_name("state.json")).read_bytes()
    if weight := changed.pop("other", 0):
        other = net(small.with_name("third.onnx"), weight)
    percent = changed.pop("percent", 5.0)
    with (
        pytest.raises(ArtifactInvalid, match=match),
        opened_for(small, other, percent, **changed),
    ):
        pass
    assert state.read_bytes() == before
    state.write_bytes(before.replace(b'"other": 0', b'"other": 1'))
    with pytest.raises(ArtifactInvalid, match="is not as it was written"):
        read_state(state)


def test_what_cannot_be_compared_is_refused(nets) -> None:
    small, other = nets
    integers = net(small.with_name("integers.onnx"), 1.0, TensorProto.INT64)
    for opening, match in (
        (opened_for(small, None), "no report of a run .* names one; .* --shadow-reference"),
        (opened_for(small, small.with_name("absent.onnx")), "absent.onnx is not there"),
        (opened_for(small, other, None), "give --shadow-limit 1%"),
        (opened_for(small, integers), "takes .*float32.* and the model to compare it with"),
    ):
        with pytest.raises((PipelineInvalid, ArtifactInvalid), match=match), opening:
            pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shadow", "1"], "--shadow 1: expected a percentage above 0, as in 1%"),
        (["--shadow", "0%"], "--shadow 0%: expected"),
        (["--shadow", "1%", "--shadow-limit", "5"], "--shadow-limit 5: expected"),
        (["--shadow", "1%", "--shadow-reference", "x", "--shadow-limit", "1%"], "leave them out"),
        (["--shadow-readiness"], "needs the share of requests: --shadow 1%"),
        (["--shadow", "1%", "--processes", "2"], "serve it alone"),
        (["--shadow", "1%", "two=absent"], "serve it alone"),
    ],
)
def test_wrong_options_are_one_line(
    nets, options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.app(["serve", str(nets[0]), "--port", "0", *options])
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1 and said in lines[0]
