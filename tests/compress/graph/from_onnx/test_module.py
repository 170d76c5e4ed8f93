"""An ONNX graph as a module: names, layers, sizes, and the proof against ONNX Runtime."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature
from compress.data.batch import Batch
from compress.graph.from_onnx import registry
from compress.graph.from_onnx.module import build
from compress.graph.from_onnx.proof import prove
from compress.graph.from_onnx.reading import load, module_of, pack, read_graph, weights_of
from compress.graph.torch_export import export_program
from compress.pruning.recovery.recovery import reestimate_batch_norms_

RNG = np.random.default_rng(0)


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), name)


def _write(path: Path, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> Path:
    value = helper.make_tensor_value_info
    inputs = [value("x", 1, ["batch", 3, "height", "width"])]
    graph = helper.make_graph(nodes, "graph", inputs, [value("y", 1, None)], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A convolution with a bias of its own, HardSwish in four operators, sizes in the graph."""
    nodes = [
        helper.make_node("Conv", ["x", "body.conv.weight"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "bias"], ["d"]),
        helper.make_node("Add", ["d", "three"], ["e"]),
        helper.make_node("Clip", ["e", "zero", "six"], ["f"]),
        helper.make_node("Mul", ["d", "f"], ["g"]),
        helper.make_node("Div", ["g", "six"], ["h"]),
        helper.make_node("Shape", ["h"], ["s"]),
        helper.make_node("Slice", ["s", "start", "end"], ["lead"]),
        helper.make_node("Concat", ["lead", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["h", "shape"], ["i"]),
        helper.make_node("ReduceMean", ["i"], ["j"], axes=[2], keepdims=0),
        helper.make_node("MatMul", ["j", "head"], ["k"]),
        helper.make_node("Relu", ["k"], ["y"], name="last"),
    ]
    numbers = {"three": 3.0, "zero": 0.0, "six": 6.0}
    lists = {"start": [0], "end": [2], "rest": [-1]}
    weights = [
        _weight("body.conv.weight", 8, 3, 3, 3),
        _weight("bias", 1, 8, 1, 1),
        _weight("head", 8, 4),
        *(numpy_helper.from_array(np.array(v, np.float32), n) for n, v in numbers.items()),
        *(numpy_helper.from_array(np.array(v, np.int64), n) for n, v in lists.items()),
    ]
    return _write(tmp_path / "net.onnx", nodes, weights)


def test_layers_have_the_names_of_their_weights(file: Path) -> None:
    module = load(file)
    conv = module.get_submodule("body.conv")
    assert isinstance(conv, nn.Conv2d)
    assert conv.bias is not None
    assert [s.node.operator for s in module.steps].count("HardSwish") == 1
    assert {type(m) for m in module.modules()} >= {nn.Conv2d, nn.Linear}


def test_a_file_and_its_module_answer_alike_at_any_size(file: Path) -> None:
    module = load(file)
    sizes = [(1, 3, 8, 8), (3, 3, 5, 9)]
    # Sums in another order; a wrong operator would differ by tenths.
    assert prove(module, file, [(torch.randn(size),) for size in sizes]) < 1e-5


def test_a_module_is_rebuilt_from_its_packed_graph(file: Path) -> None:
    graph = read_graph(file)
    module, packed = module_of(graph), pack(graph)
    assert len(packed) < 4000
    rebuilt = build(packed)
    rebuilt.load_state_dict(module.state_dict())
    x = torch.randn(2, 3, 6, 6)
    # Of a weight that lies in memory as its transpose, some processors' products differ in a bit.
    torch.testing.assert_close(rebuilt.eval()(x)["y"], module(x)["y"])
    assert set(weights_of(module, graph)) == set(module.state_dict())


def test_named_axes_stay_dynamic_in_a_traced_program(file: Path) -> None:
    signature = Signature.model_validate(
        {"inputs": [{"name": "x", "shape": ["batch", 3, "height", "width"]}]}
    )
    module = load(file)
    program = export_program(module, signature).module()
    x = torch.randn(5, 3, 7, 12)
    torch.testing.assert_close(program(x)[0], module(x)["y"])


def test_the_first_wrong_node_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.OPERATORS, "Relu", lambda node, x: x)
    module = load(file)
    with pytest.raises(ArtifactInvalid, match=re.escape("first at Relu (last)")):
        prove(module, file, [(torch.randn(1, 3, 8, 8),)])


def test_an_output_that_is_nearly_nothing_is_compared_by_its_absolute_error(tmp_path: Path) -> None:
    far = numpy_helper.from_array(np.array([1.0, -19.0], np.float32), "far")  # ONNX Runtime gives 0
    nodes = [
        helper.make_node("Mul", ["x", "far"], ["a"]),
        helper.make_node("Sigmoid", ["a"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["n", 2])], [value("y", 1, None)], [far])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), tmp_path / "f")
    inputs = torch.tensor([[-20.0, 1.0], [-25.0, 1.2]])
    assert prove(load(tmp_path / "f"), tmp_path / "f", [(inputs,)]) < 1e-3


def test_batch_normalization_keeps_the_statistics_of_the_file_in_training(tmp_path: Path) -> None:
    keys = ("weight", "bias", "mean", "var")
    node = helper.make_node("BatchNormalization", ["x", *keys], ["y"])
    var = numpy_helper.from_array(np.array([4, 5, 6], np.float32), "var")
    module = load(_write(tmp_path / "norm.onnx", [node], [*(_weight(k, 3) for k in keys[:3]), var]))
    x = torch.randn(8, 3, 4, 4)
    expected = module.eval()(x)["y"]
    module.train()
    torch.testing.assert_close(module(x)["y"], expected)
    reestimate_batch_norms_(module, [Batch((x,), None)])
    torch.testing.assert_close(module(x)["y"], expected)
    assert {name for name, weight in module.named_parameters() if weight.requires_grad} == {
        "y.bias",
        "y.weight",
    }


def test_branches_on_constants_are_taken_and_loops_unrolled() -> None:
    value = helper.make_tensor_value_info
    step = helper.make_graph(
        [
            helper.make_node("Add", ["total", "x"], ["more"]),
            helper.make_node("Identity", ["go"], ["again"]),
        ],
        "body",
        [value("i", 7, []), value("go", 9, []), value("total", 1, [2])],
        [value("again", 9, []), value("more", 1, [2])],
    )
    nodes = [helper.make_node("Loop", ["count", "", "x"], ["y"], body=step)]
    three = numpy_helper.from_array(np.array(3, np.int64), "count")
    graph = helper.make_graph(nodes, "graph", [value("x", 1, [2])], [value("y", 1, [2])], [three])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)])
    module = module_of(ir.from_proto(model))
    assert module(torch.tensor([1.0, 2.0]))["y"].tolist() == [4.0, 8.0]


def test_slices_to_a_far_end_keep_an_axis_dynamic(tmp_path: Path) -> None:
    """tf2onnx writes 10^9 for the end of an axis."""
    nodes = [helper.make_node("Slice", ["x", "start", "end"], ["y"])]
    lists = {"start": [0] * 4, "end": [10**9] * 4}
    weights = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in lists.items()]
    signature = Signature.model_validate({"inputs": [{"name": "x", "shape": ["batch", 3, 8, 8]}]})
    program = export_program(load(_write(tmp_path / "far.onnx", nodes, weights)), signature)
    assert program.module()(torch.randn(5, 3, 8, 8))[0].shape == (5, 3, 8, 8)


def test_cells_of_a_pad_that_are_computed_from_constants_are_folded(tmp_path: Path) -> None:
    """As torch's older exporter writes `F.pad`."""
    zero = helper.make_tensor("zero", onnx.TensorProto.INT64, [1], [0])
    nodes = [
        helper.make_node("ConstantOfShape", ["four"], ["zeros"], value=zero),
        helper.make_node("Concat", ["given", "zeros"], ["flat"], axis=0),
        helper.make_node("Reshape", ["flat", "pairs"], ["square"]),
        helper.make_node("Slice", ["square", "minus_one", "lowest", "first", "minus_one"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[1, 0]),
        helper.make_node("Reshape", ["t", "all"], ["cells"]),
        helper.make_node("Pad", ["x", "cells"], ["y"]),
    ]
    lists = {"four": [4], "given": [1, 2, 0, 1], "pairs": [-1, 2], "minus_one": [-1]}
    lists |= {"lowest": [-(2**63)], "first": [0], "all": [-1]}
    weights = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in lists.items()]
    module = load(_write(tmp_path / "pad.onnx", nodes, weights))
    assert [step.node.operator for step in module.steps] == ["Pad"]
    signature = Signature.model_validate({"inputs": [{"name": "x", "shape": ["batch", 3, 8, 8]}]})
    program = export_program(module, signature)
    assert program.module()(torch.randn(5, 3, 8, 8))[0].shape == (5, 3, 9, 11)


def test_operators_that_onnx_defines_by_older_ones_are_expanded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "graph", [value("x", 1, ["n", 4])], [value("y", 1, None)])
    # The operator's body was written for version 11, of which 12 keeps all that it uses.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)])
    onnx.save(model, tmp_path / "file.onnx")
    module = load(tmp_path / "file.onnx")
    rows = torch.linspace(-1, 2, 12).reshape(3, 4)
    assert prove(module, tmp_path / "file.onnx", [(rows,)]) < 1e-6


def test_weights_in_a_file_beside_it_are_mapped_and_the_graph_lives_without_them(
    file: Path, tmp_path: Path
) -> None:
    before = load(file).state_dict()
    apart, data = tmp_path / "apart.onnx", tmp_path / "apart.onnx.data"
    where = {"save_as_external_data": True, "location": data.name, "size_threshold": 0}
    onnx.save(onnx.load(file), apart, **where)
    content = data.read_bytes()
    graph = read_graph(apart)
    module, x = module_of(graph), torch.randn(2, 3, 6, 6)
    expected = module(x)["y"]
    assert all(torch.equal(module.state_dict()[k], v) for k, v in before.items())
    with torch.no_grad():
        module.get_parameter("body.conv.weight").zero_()
    assert data.read_bytes() == content, "what is mapped is copied where it is written to"
    data.unlink()
    rebuilt = build(pack(graph))  # sizes that the graph computes with are in it
    rebuilt.load_state_dict(before)
    torch.testing.assert_close(rebuilt.eval()(x)["y"], expected)


@pytest.mark.parametrize("kind", ["padded", "recurrent", "split"])
def test_a_copy_answers_by_its_own_layers(kind: str, tmp_path: Path) -> None:
    """A closure would go on with the layers of the module that was copied."""
    nodes = {
        "padded": [helper.make_node("Conv", ["x", "w"], ["y"], pads=[0, 0, 1, 1], name="a")],
        "recurrent": [
            helper.make_node("Squeeze", ["x", "axis"], ["steps"]),
            helper.make_node("RNN", ["steps", "wi", "wh"], ["y"], hidden_size=5, name="a"),
        ],
        "split": [helper.make_node("Split", ["x", "sizes"], ["z", "y"], axis=1, name="a")],
    }
    weights = [_weight("w", 4, 3, 2, 2), _weight("wi", 1, 5, 6), _weight("wh", 1, 5, 5)]
    lists = {"axis": [0], "sizes": [1, 2]}
    weights += [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in lists.items()]
    module = load(_write(tmp_path / "net.onnx", nodes[kind], weights))
    twin, x = copy.deepcopy(module), torch.randn(1, 3, 5, 6)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        for part in twin.modules():
            if hasattr(part, "sizes"):
                part.sizes = [2, 1]
        before, after = module(x)["y"], twin(x)["y"]
    if kind == "split":
        assert (before.shape[1], after.shape[1]) == (2, 1)
    else:
        assert before.any() and not after.any()
