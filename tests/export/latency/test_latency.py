"""Kernels of onnxruntime's optimized graphs, their table, and predictions from them."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.common.errors import ArtifactInvalid
from compress.export.latency import kernels as kernel_table
from compress.export.latency.kernels import KernelTable, kernels_of, measure_kernels
from compress.export.latency.served_latency import KernelCost, LatencyModel
from compress.profiling.benchmark import NotMeasurable

MACHINE = {"processor": "a processor"}


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Write two equal convolutions, one with a ReLU, and a layer that looks rows up in a table."""
    rng = np.random.default_rng(0)
    weights = {
        "first": rng.normal(size=(16, 16, 3, 3)).astype("f"),
        "second": rng.normal(size=(16, 16, 3, 3)).astype("f"),
        "rows": rng.normal(size=(4, 3)).astype("f"),
        "axes": np.array([1, 2, 3]),
    }
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], **pads),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"], **pads),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("ReduceMean", ["d", "axes"], ["e"], keepdims=0),
        helper.make_node("Gather", ["rows", "index"], ["f"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16, 8, 8]),
        helper.make_tensor_value_info("index", TensorProto.INT64, ["batch"]),
    ]
    outputs = [
        helper.make_tensor_value_info("e", TensorProto.FLOAT, ["batch"]),
        helper.make_tensor_value_info("f", TensorProto.FLOAT, ["batch", 3]),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, initializers)
    file = tmp_path / "net.onnx"
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), file)
    return file


def feed(batch: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(batch, 16, 8, 8)).astype("f"),
        "index": np.arange(batch) % 4,
    }


def test_kernels_are_those_of_the_optimized_graph(network) -> None:
    kernels = kernels_of(network, feed(), threads=1)
    operators = [kernel.operator for kernel in kernels]
    assert operators.count("Conv") == 2
    assert "Relu" not in operators, "ReLU is computed by the convolution's kernel"
    first, second = (kernel for kernel in kernels if kernel.operator == "Conv")
    assert first.key == second.key
    assert first.weight_bytes == 16 * 16 * 9 * 4
    assert "16×16×3×3" in first.sizes
    (lookup,) = (kernel for kernel in kernels if kernel.operator == "Gather")
    assert lookup.sizes == "4×3 1 → 1×3"


def test_each_kernel_alone_computes_what_it_does_in_the_model(network) -> None:
    inputs = feed(2)
    values = dict(inputs)
    for kernel in kernels_of(network, inputs, threads=1):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        alone = onnxruntime.InferenceSession(kernel.to_model().SerializeToString(), options)
        outputs = alone.run(None, {name: values[name] for name in kernel.inputs})
        values |= dict(zip(kernel.node.output, outputs, strict=True))
    expected = onnxruntime.InferenceSession(network).run(["e", "f"], inputs)
    for name, array in zip("ef", expected, strict=True):
        np.testing.assert_allclose(values[name], array, rtol=1e-5, atol=1e-6)


def test_other_sizes_are_other_kernels(network) -> None:
    one, two = (
        [kernel.key for kernel in kernels_of(network, feed(batch), threads=1)] for batch in (1, 2)
    )
    assert not set(one) & set(two)


def test_kernels_are_measured_once_for_each_machine_and_number_of_threads(
    network, tmp_path, monkeypatch
) -> None:
    measured: list[str] = []

    def count(kernels, threads):
        measured.extend(kernel.operator for kernel in kernels)
        return measure_kernels(kernels, threads)

    monkeypatch.setattr(kernel_table, "measure_kernels", count)
    kernels = kernels_of(network, feed(), threads=1)
    table = KernelTable(tmp_path / "latency", MACHINE, 1)
    table.measure(kernels)
    assert measured.count("Conv") == 1, "two equal kernels are measured once"
    assert all(table.seconds(kernel) >= 0 for kernel in kernels)
    measured.clear()
    again = KernelTable(tmp_path / "latency", MACHINE, 1)
    again.measure(kernels)
    assert not measured
    assert again.kernels == table.kernels
    assert not KernelTable(tmp_path / "latency", MACHINE, 2).kernels
    assert not KernelTable(tmp_path / "latency", {"processor": "another"}, 1).kernels


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"kernels": {"a": 1}}', '{"kernels": {"a": {"seconds": "x"}}}']
)
def test_a_damaged_table_is_measured_again(network, tmp_path, content) -> None:
    kernels = kernels_of(network, feed(), threads=1)
    table = KernelTable(tmp_path, MACHINE, 1)
    table.file.write_text(content)
    table = KernelTable(tmp_path, MACHINE, 1)
    assert not table.kernels
    table.measure(kernels)
    assert set(json.loads(table.file.read_text())["content"]["kernels"]) == {k.key for k in kernels}


def test_a_file_that_is_no_model_is_refused(tmp_path) -> None:
    file = tmp_path / "net.onnx"
    file.write_bytes(b"no model")
    with pytest.raises(ArtifactInvalid, match="cannot load it"):
        kernels_of(file, feed(), threads=1)


COSTS = [
    KernelCost(1e-4 * number, weights)
    for number, weights in enumerate((1_000_000, 4_000_000, 500_000, 2_000_000), 1)
]


def test_the_coefficients_are_those_that_latencies_were_made_with() -> None:
    made = LatencyModel(per_kernel_second=1.3, per_weight_byte=2e-10, per_call=2e-5)
    fitted = LatencyModel.fit(COSTS, list(map(made.predict, COSTS)))
    for name, value in made.model_dump().items():
        assert getattr(fitted, name) == pytest.approx(value)


def test_no_coefficient_is_negative() -> None:
    seconds = [1e-3 - cost.seconds for cost in COSTS]
    fitted = LatencyModel.fit(COSTS, seconds)
    assert min(fitted.model_dump().values()) >= 0


def test_kernels_that_are_disturbed_for_a_moment_are_measured_again(network, monkeypatch) -> None:
    kernels, tried = kernels_of(network, feed(), threads=1)[:2], []
    busy = NotMeasurable("the latency of a kernel is not measurable on this machine now")

    def seconds_of(some, threads):
        tried.append(len(some))
        if len(tried) in disturbed:
            raise busy
        return [1.0] * len(some)

    monkeypatch.setattr(kernel_table, "_seconds_of_now", seconds_of)
    monkeypatch.setattr(kernel_table, "PAUSES", (0.0, 0.0))
    disturbed = {1, 3, 4}  # once of the empty call, twice of the kernels
    assert measure_kernels(kernels, 1) == [0.0, 0.0] and tried == [1, 1, 2, 2, 2]
    disturbed = {*range(99)}
    with pytest.raises(NotMeasurable):
        measure_kernels(kernels, 1)
    assert tried == [1, 1, 2, 2, 2, 1, 1, 1]
