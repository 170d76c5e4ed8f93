"""Patterns of exporters become one operator or layer, with the outputs of the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from compress.graph.from_onnx.proof import prove
from compress.graph.from_onnx.reading import load

if TYPE_CHECKING:
    from compress.graph.from_onnx.module import OnnxModule

OLD_NORM = """
    m = ReduceMean <axes = [-1], keepdims = 1> (x)
    d = Sub (x, m)
    p = Pow (d, two)
    v = ReduceMean <axes = [2], keepdims = 1> (p)
    e = Add (v, epsilon)
    s = Sqrt (e)
    n = Div (d, s)
    g = Mul (n, weight)
    y = Add (g, bias)
"""
NEW_NORM = """
    m = ReduceMean <keepdims = 1> (x, last)
    d = Sub (x, m)
    q = Mul (d, d)
    v = ReduceMean <keepdims = 1> (q, last)
    e = Add (epsilon, v)
    s = Sqrt (e)
    r = Reciprocal (s)
    n = Mul (r, d)
    g = Mul (weight, n)
    y = Add (bias, g)
"""
RMS_NORM = """
    q = Pow (x, two)
    v = ReduceMean <keepdims = 1> (q, last)
    e = Add (v, epsilon)
    s = Sqrt (e)
    r = Div (one, s)
    n = Mul (x, r)
    y = Mul (weight, n)
"""
SCALED_SCORES = """
    t = Transpose <perm = [0, 2, 1]> (x)
    a = MatMul (x, t)
    b = Div (a, two)
    c = Add (mask, b)
    w = Softmax <axis = -1> (c)
    y = MatMul (w, x)
"""
SCALED_OPERANDS = """
    q = Mul (half, x)
    t = Transpose <perm = [0, 2, 1]> (x)
    k = Mul (t, half)
    a = MatMul (q, k)
    w = Softmax <axis = 2> (a)
    i = IsNaN (w)
    z = Where (i, zero, w)
    y = MatMul (z, x)
"""
GELU = """
    a = Div (x, root)
    e = Erf (a)
    f = Add (e, one)
    g = Mul (f, x)
    y = Mul (half, g)
"""
TANH_GELU = """
    c = Pow (x, three)
    d = Mul (factor, c)
    e = Add (d, x)
    f = Mul (e, root_of_two_over_pi)
    t = Tanh (f)
    u = Add (t, one)
    h = Mul (x, half)
    y = Mul (h, u)
"""
HARD_SWISH = """
    a = Add (three, x)
    c = Clip (a, zero, six)
    d = Div (c, sixes)
    y = Mul (d, x)
"""
HARD_SIGMOID = """
    a = Add (x, three)
    c = Clip (a, zero, six)
    y = Mul (c, sixth)
"""
NUMBERS = {
    **{"zero": 0.0, "half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "six": 6.0},
    **{"epsilon": 1e-5, "root": 2**0.5, "factor": 0.044715, "sixes": [6.0], "sixth": 1 / 6},
    **{"root_of_two_over_pi": (2 / np.pi) ** 0.5, "weight": [1.5, -2.0, 0.5, 3.0]},
    **{"bias": [0.5, -1.0, 2.0, 0.25], "mask": [[0.0, -9.0, 0.0]]},
}


def _load(folder: Path, nodes: str, opset: int, output: str = "y") -> OnnxModule:
    """Write a graph of `x`, three rows of four numbers, and read it as a module that is proven."""
    head = f'<ir_version: 8, opset_import: ["": {opset}]>'
    text = f"{head} g (float[batch, 3, 4] x) => (float[batch, 3, size] {output})"
    model = parser.parse_model(f"{text} {{{nodes}}}")
    tensors = {name: np.array(number, np.float32) for name, number in NUMBERS.items()}
    tensors |= {"last": np.array([-1]), "table": np.arange(8).reshape(4, 2)}
    tensors |= {
        "kernel": np.ones((4, 3, 1), np.float32),
        "point": np.arange(9, dtype=np.float32).reshape(3, 3, 1),
        "wide": np.arange(27, dtype=np.float32).reshape(3, 3, 3),
        "shifts": np.array([0.5, -1.0, 2.0], np.float32),
        "column": np.arange(4, dtype=np.float32)[:, None],
    }
    tensors["doubles"] = np.array([0.5, 1.0, 2.0])
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in tensors.items() if name in read
    )
    file = folder / "net.onnx"
    onnx.save(model, file)
    module = load(file)
    torch.manual_seed(1)  # the root of a mean of cubes is inexact where that is almost 0
    assert prove(module, file, [(torch.randn(rows, 3, 4),) for rows in (1, 5)]) < 1e-6
    return module


def _operators(module: OnnxModule) -> list[str]:
    return [step.node.operator for step in module.steps]


@pytest.mark.parametrize(
    ("nodes", "opset", "operator"),
    [
        (OLD_NORM, 11, "LayerNormalization"),
        (NEW_NORM, 18, "LayerNormalization"),
        (RMS_NORM, 18, "RMSNormalization"),
        (GELU, 13, "Gelu"),
        (TANH_GELU, 13, "Gelu"),
        (HARD_SWISH, 11, "HardSwish"),
        (HARD_SIGMOID, 11, "HardSigmoid"),
    ],
)
def test_a_pattern_becomes_one_operator(
    tmp_path: Path, nodes: str, opset: int, operator: str
) -> None:
    assert _operators(_load(tmp_path, nodes, opset)) == [operator]


def test_norms_become_layers(tmp_path: Path) -> None:
    (norm,) = _load(tmp_path, OLD_NORM, 11).children()
    assert isinstance(norm, nn.LayerNorm)
    assert norm.bias.tolist() == NUMBERS["bias"]
    (norm,) = _load(tmp_path, RMS_NORM, 18).children()
    assert isinstance(norm, nn.RMSNorm)


@pytest.mark.parametrize(
    ("nodes", "opset", "scale", "inputs"),
    [(SCALED_SCORES, 13, 0.5, 4), (SCALED_OPERANDS, 12, 0.25, 3)],
)
def test_attention_becomes_one_operator(
    tmp_path: Path, nodes: str, opset: int, scale: float, inputs: int
) -> None:
    (step,) = _load(tmp_path, nodes, opset).steps
    assert step.node.operator == "ScaledDotProductAttention"
    assert step.node.get("scale") == scale
    assert len(step.inputs) == inputs


@pytest.mark.parametrize(
    ("nodes", "opset", "change"),
    [
        (OLD_NORM, 11, ("axes = [2]", "axes = [1]")),  # the variance is over another axis
        (NEW_NORM, 18, ("(r, d)", "(s, d)")),
        (RMS_NORM, 18, ("Pow (x, two)", "Pow (x, three)")),
        (GELU, 13, ("Div (x, root)", "Div (x, two)")),
        (HARD_SWISH, 11, ("Add (three", "Add (two")),
        (HARD_SWISH, 9, ("Clip (a, zero, six)", "Clip <max = 6.0> (a)")),
        (SCALED_SCORES, 13, ("axis = -1", "axis = 1")),
        (SCALED_SCORES, 13, ("(mask, b)", "(two, b)")),  # PyTorch's masks have axes
    ],
)
def test_what_differs_from_a_pattern_stays(
    tmp_path: Path, nodes: str, opset: int, change: tuple[str, str]
) -> None:
    assert change[0] in nodes
    assert len(_load(tmp_path, nodes.replace(*change), opset).steps) > 2


def test_a_column_that_is_added_to_each_column_is_no_bias(tmp_path: Path) -> None:
    nodes = "r = Reshape (x, square) s = Gemm (r, w, column) y = Reshape (s, rows)"
    tensors = {"w": np.eye(4, dtype=np.float32), "column": np.arange(4, dtype=np.float32)[:, None]}
    tensors |= {"square": np.array([4, 4]), "rows": np.array([1, 4, 4])}
    graph = '<ir_version: 8, opset_import: ["": 13]> g (float[1, 4, 4] x) => (float[1, 4, 4] y)'
    model = parser.parse_model(f"{graph} {{{nodes}}}")
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in tensors.items())
    onnx.save(model, tmp_path / "net.onnx")
    module = load(tmp_path / "net.onnx")
    assert prove(module, tmp_path / "net.onnx", [(torch.randn(1, 4, 4),)]) < 1e-6


def test_attention_of_five_axes_stays_in_products(tmp_path: Path) -> None:
    nodes = """
        u = Unsqueeze <axes = [0, 1]> (x)
        t = Transpose <perm = [0, 1, 2, 4, 3]> (u)
        a = MatMul (u, t)
        w = Softmax <axis = -1> (a)
        p = MatMul (w, u)
        y = Squeeze <axes = [0, 1]> (p)
    """
    assert _operators(_load(tmp_path, nodes, 11)).count("MatMul") == 2


def test_statistics_have_the_precision_of_their_input_and_may_be_one_tensor(tmp_path: Path) -> None:
    nodes = """
        d = Cast <to = 11> (x)
        n = BatchNormalization (d, doubles, doubles, doubles, doubles)
        y = Cast <to = 1> (n)
    """
    assert _operators(_load(tmp_path, nodes, 15))[1] == "BatchNormalization"


def test_a_bias_keeps_its_axes_for_other_nodes(tmp_path: Path) -> None:
    nodes = """
        c = Conv (x, kernel)
        a = Add (c, column)
        y = Mul (a, column)
    """
    assert _operators(_load(tmp_path, nodes, 13)) == ["Conv", "Mul"]


def test_products_of_integers_are_no_layers(tmp_path: Path) -> None:
    nodes = "i = Cast <to = 7> (x) m = MatMul (i, table) y = Cast <to = 1> (m)"
    assert _operators(_load(tmp_path, nodes, 13)) == ["Cast", "MatMul", "Cast"]


def test_a_value_that_is_also_an_output_is_still_computed(tmp_path: Path) -> None:
    operators = _operators(_load(tmp_path, SCALED_SCORES, 13, "w"))
    assert operators[-1] == "Softmax"


AROUND = """
    a = Mul (x, two)
    b = Add (half, a)
    c = Conv CONVOLUTION
    d = Mul (half, c)
    y = Add (d, one)
"""


@pytest.mark.parametrize(
    ("convolution", "left"),
    [
        ("(b, point, shifts)", []),
        ("<pads = [1, 1]> (b, wide, shifts)", ["Constant", "Add"]),  # the padding stays zero
    ],
)
def test_numbers_around_a_convolution_become_part_of_it(
    tmp_path: Path, convolution: str, left: list[str]
) -> None:
    module = _load(tmp_path, AROUND.replace("CONVOLUTION", convolution), 13)
    assert _operators(module) == [*left, "Conv"]


def test_a_convolution_without_bias_or_with_shared_weights_keeps_its_numbers(
    tmp_path: Path,
) -> None:
    bare = _load(tmp_path, AROUND.replace("CONVOLUTION", "(b, point)"), 13)
    assert _operators(bare) == ["Mul", "Add", "Conv", "Add"]  # what it is multiplied by is folded
    twice = "a = Conv (x, point, shifts) b = Mul (a, two) y = Conv (b, point, shifts)"
    assert _operators(_load(tmp_path, twice, 13)) == ["Conv", "Mul", "Conv"]
