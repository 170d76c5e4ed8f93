"""Parts of constant sizes in an ONNX graph, as of YOLO's C2f blocks: they lose channels, too."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from compress.data.batch import Batch
from compress.graph.from_onnx.reading import load
from compress.pruning.allocation.ranking import Ranking, rank
from compress.pruning.channel_settings import ChannelSelection
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.latency.widths import WidthSpace
from compress.pruning.verification.masked_equivalence import VerificationInputs, sliced_copy

ALL = ChannelSelection(importance="l2", round_to=1)


def c2f(path: Path, *, opset: int) -> nn.Module:
    """Half of a convolution's channels pass a bottleneck; before opset 13 sizes are attributes."""
    generator = np.random.default_rng(0)
    shapes = {
        "cv1": (32, 3, 1, 1),
        "m1": (16, 16, 3, 3),
        "m2": (16, 16, 3, 3),
        "cv2": (24, 48, 1, 1),
        "head": (2, 24, 1, 1),
    }
    nodes = []

    def conv(x: str, layer: str) -> str:
        pad = shapes[layer][2] // 2
        names = [x, f"{layer}.weight"], [f"{layer}-out"]
        nodes.append(helper.make_node("Conv", *names, name=layer, pads=[pad] * 4))
        nodes.append(helper.make_node("Relu", [f"{layer}-out"], [f"{layer}-act"]))
        return f"{layer}-act"

    weights = [
        numpy_helper.from_array(generator.normal(0, 0.2, shape).astype(np.float32), f"{n}.weight")
        for n, shape in shapes.items()
    ]
    sizes = np.array([16, 16], np.int64)
    given = {"split": sizes.tolist()} if opset < 13 else {}
    read = [conv("x", "cv1"), *([] if given else ["sizes"])]
    nodes.append(helper.make_node("Split", read, ["l", "r"], name="/cv1/Split", axis=1, **given))
    nodes.append(helper.make_node("Add", ["r", conv(conv("r", "m1"), "m2")], ["sum"]))
    nodes.append(helper.make_node("Concat", ["l", "r", "sum"], ["joined"], axis=1))
    nodes.append(helper.make_node("Identity", [conv(conv("joined", "cv2"), "head")], ["y"]))
    value = helper.make_tensor_value_info
    ends = [value("x", 1, ["batch", 3, "h", "w"])], [value("y", 1, None)]
    constants = weights if given else [*weights, numpy_helper.from_array(sizes, "sizes")]
    graph = helper.make_graph(nodes, "graph", *ends, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), path)
    return load(path)


def ranked(module: nn.Module) -> Ranking:
    inputs = VerificationInputs((torch.randn(2, 3, 8, 8),))
    return rank(module, inputs, ALL, ScoringSamples())


@pytest.mark.parametrize("opset", [11, 17])
def test_the_parts_of_a_split_lose_channels(opset: int, tmp_path: Path) -> None:
    module = c2f(tmp_path / "c2f.onnx", opset=opset)
    ranking = ranked(module)
    assert [one.group.name for one in ranking.ranked] == ["cv1", "cv1#2", "m1", "cv2"]
    plan = ranking.verify(ranking.counts_for({"cv1": 12, "cv1#2": 4, "cv2": 20}))
    assert {one.group.name: one.after for one in plan.groups} == {
        "cv1": 12,
        "cv1#2": 4,
        "cv2": 20,
    }
    assert plan.attributes == {"cv1_Split.sizes": [12, 4]}
    sliced = sliced_copy(module, plan)
    shapes = {name: tuple(tensor.shape) for name, tensor in sliced.state_dict().items()}
    assert shapes["cv1.weight"] == (16, 3, 1, 1) and shapes["cv2.weight"] == (20, 20, 1, 1)
    assert sliced(torch.randn(1, 3, 8, 8))["y"].shape == (1, 2, 8, 8)
    assert module.get_submodule("cv1_Split").sizes == [16, 16]


def test_each_part_has_widths_of_its_own(tmp_path: Path) -> None:
    ranking = ranked(c2f(tmp_path / "c2f.onnx", opset=17))
    smallest = ranking.verify(ranking.allocate(0.5, ALL))
    grid = {one.group.name: (len(one.scores), one.original // 2) for one in ranking.ranked}
    slices = {one.group.name: one for one in smallest.groups}
    batch = Batch((torch.randn(16, 3, 8, 8),), None)
    space = WidthSpace(ranking, grid, [batch], "cpu", True, slices)
    for group, sizes in {"cv1": [8, 16], "cv1#2": [16, 8]}.items():
        cut = space.cut(group, 8)
        assert cut.get_submodule("cv1_Split").sizes == sizes
        assert cut.get_submodule("cv1").weight.shape[0] == 24
