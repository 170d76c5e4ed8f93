"""A profile of a file by the user's modules, its costly parts, and the file without them."""

from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.core.context import Context
from compress.export.diagnosis.profile import (
    Profile,
    fitting_names,
    plain_export,
    without,
)
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import session_predictor
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import images, samples


@pytest.fixture(scope="module")
def plain(net: EagerModel) -> tuple[Profile, list[str]]:
    model, names = plain_export(net)
    return Profile.measure(model, names, net.signature.example(batch=1), 1), names


def test_every_module_has_its_kernels(plain: tuple[Profile, list[str]]) -> None:
    profile, names = plain
    assert names == ["stem", "inner", "last", "head"]
    assert {*profile.by_module} == {*names}
    assert sum(profile.by_module.values()) == pytest.approx(profile.ms)
    assert all(node.ms > 0 for node in profile.nodes)
    sizes = {n.module: n.written_bytes for n in profile.nodes if n.node.op_type == "Conv"}
    assert sizes == dict.fromkeys(names[:3], 16 * 8 * 8 * 4)


def test_a_norm_behind_an_activation_is_not_fused(plain: tuple[Profile, list[str]]) -> None:
    profile, _ = plain
    (norm,) = (node.origin for node in profile.unfused)
    assert norm is not None and norm.op_type == "BatchNormalization"
    left = without(profile.model, [norm.name])
    operators = [node.op_type for node in profile.model.graph]
    assert [n.op_type for n in left.graph] == [o for o in operators if o != "BatchNormalization"]


def test_a_file_of_other_layers_has_places_for_names(plain: tuple[Profile, list[str]]) -> None:
    model, names = plain[0].model, plain[1]
    assert fitting_names(model, names) == names
    assert fitting_names(model, names[1:])[0] == "layer 0 (Conv)"


def test_a_pair_that_no_kernel_reads_is_found_and_left_out(
    rounding: EagerModel, tmp_path: Path
) -> None:
    model, names = plain_export(rounding)
    inputs = rounding.signature.example(batch=1)
    profile = Profile.measure(model, names, inputs, 1)
    pair = profile.lone_pairs
    kinds = {"QuantizeLinear", "DequantizeLinear"}
    assert {n.node.op_type for n in pair} >= kinds
    assert not profile.float_islands, "no integer kernel is beside it"
    left = without(profile.model, [n.origin.name for n in pair if n.node.op_type in kinds])
    assert not kinds & {node.op_type for node in left.graph}
    write(left, tmp_path / "left.onnx")
    found = session_predictor(tmp_path / "left.onnx", 1)(*inputs)
    module = rounding.load().eval()
    module.rounds = False
    with torch.no_grad():
        torch.testing.assert_close(found[0], module(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_float_layer_between_integer_ones_is_an_island(net: EagerModel, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "int8", data=samples(images()))
    stage = QuantizeStatic(name="int8", calibration_samples=32, exclude=("inner",))
    graph = stage.run_checked(net, context)
    _, names = plain_export(net)
    model, _ = ExportOnnx(name="onnx").translated(graph)
    inputs = net.signature.example(batch=1)
    found = Profile.measure(model, names, inputs, 1)
    islands = [i for i in found.float_islands if "inner" in i.modules]
    assert len(islands) == 1 and found.integer_modules == {"stem", "last", "head"}
    assert any(node.node.op_type == "Conv" for node in islands[0].nodes)
    around = {node.node.op_type for node in islands[0].conversions}
    assert around >= {"QuantizeLinear", "DequantizeLinear"}
    assert "stem" in islands[0].around
