"""What an export holds at the same time: no weight twice, no model beside another."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common import tensor_difference
from compress.common.errors import ArtifactInvalid
from compress.common.forward import Predictor
from compress.common.process import gc_disabled, gc_frozen
from compress.common.signature import Signature, TensorSpec
from compress.common.tensor_difference import relative_error
from compress.core import context as context_module
from compress.core.context import Context
from compress.export.onnx import proto_io
from compress.export.onnx.graph import count_macs
from compress.export.onnx.lowering import lower
from compress.export.onnx.proto_io import (
    free_weights_,
    mapped,
    read,
    read_briefly,
    write,
    write_mapped,
)
from compress.export.onnx.session import session_predictor
from compress.export.parity.compare import recorded_outputs
from compress.graph.torch_export import export_program

ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 20)),))
LINEAR = Recipe(factory="torch.nn:Linear", arguments={"in_features": 20, "out_features": 20})


@pytest.fixture
def graph() -> ir.Model:
    """Return products and a sum: a weight that is plain, two that are not, and two small ones."""
    rows = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 20]) for n in "xy"]
    weight = torch.randn(20, 20, generator=torch.Generator().manual_seed(0)).numpy()
    described = numpy_helper.from_array(weight, "described")
    described.doc_string = "a weight with a word after its numbers"
    tensors = [
        numpy_helper.from_array(weight, "plain"),
        described,
        numpy_helper.from_array(weight, "transposed"),
        numpy_helper.from_array(weight[0], "small"),
        helper.make_tensor("listed", TensorProto.FLOAT, [20], weight[1]),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "plain"], ["a"]),
        helper.make_node("MatMul", ["a", "described"], ["b"]),
        helper.make_node("MatMul", ["b", "transposed"], ["c"]),
        helper.make_node("Sum", ["c", "small", "listed"], ["y"]),
    ]
    made = helper.make_graph(nodes, "g", rows[:1], rows[1:], tensors, doc_string="after them")
    opset = helper.make_opsetid("", 20)
    model = helper.make_model(made, opset_imports=[opset], ir_version=10)
    helper.set_model_props(model, {"signature": "{}"})
    graph = ir.from_proto(model)
    # As onnxscript folds a transpose: in memory columns come one after the other.
    graph.graph.initializers["transposed"].const_value = ir.Tensor(weight.T, name="transposed")
    return graph


def test_a_file_written_in_parts_is_as_protobuf_writes_it(graph: ir.Model, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    whole = ir.to_proto(graph)
    write(graph, file)
    del whole.graph.value_info[:]  # of the tensors, whose types they say themselves
    for tensor in whole.graph.initializer:  # each has its name, sizes, type and raw data alone
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    assert file.read_bytes() == whole.SerializeToString(deterministic=True)


def test_a_mapped_graph_reads_the_weights_of_the_file(graph: ir.Model, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    write(graph, file)
    write_mapped(graph, file)
    with mapped(file) as beside:
        assert beside != file
        outside = onnx.load(beside, load_external_data=False).graph.initializer
        external = TensorProto.EXTERNAL
        assert [t.data_location for t in outside] == [*[external] * 3, 0, 0]
        x = torch.randn(3, 20)
        (whole,), (through,) = (session_predictor(f, 1)(x) for f in (file, beside))
        assert torch.equal(whole, through)
        plain = ir.to_proto(graph).graph.initializer[0].raw_data
        file.write_bytes(file.read_bytes().replace(plain, bytes(len(plain)), 1))
        (other,) = session_predictor(beside, 1)(x)
        assert not torch.equal(other, whole)
    assert list(tmp_path.iterdir()) == [file]


def test_a_large_model_has_its_weights_in_a_second_file(
    graph: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 20)
    write(graph, tmp_path / "whole.onnx")
    monkeypatch.setattr(proto_io, "LARGEST", 1)
    write(graph, file := tmp_path / "model.onnx")
    write_mapped(graph, file)
    assert {part.name for part in tmp_path.iterdir()} == {
        "whole.onnx",
        file.name,
        "model.onnx.data",
    }
    (whole,), (apart,) = (session_predictor(f, 1)(x) for f in (tmp_path / "whole.onnx", file))
    assert torch.equal(whole, apart)


def test_weights_are_not_read_through_links_that_lead_out(graph: ir.Model, tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    file, weights = folder / "model.onnx", folder / "model.onnx.data"
    ir.save(graph, file, external_data=weights.name)
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    for with_weights in (False, True):
        with pytest.raises(ArtifactInvalid, match=r"model\.onnx\.data: is a link that leads out"):
            read(file, weights=with_weights)


class Tied(nn.Module):
    """One weight under two names, and one that BatchNorm is folded into."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.second = nn.Linear(20, 20)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def test_a_graphs_weights_are_its_programs() -> None:
    program = export_program(Tied().eval(), ROWS)
    model = lower(program, ROWS, None)
    own = {t.data_ptr() for t in program.state_dict.values()}
    raw = [tensor.raw for tensor in model.graph.initializers.tensors() if tensor.nbytes > 99]
    assert raw and all(isinstance(t, torch.Tensor) and t.data_ptr() in own for t in raw)
    free_weights_(model)
    assert not any(t.numel() for t in raw)


@pytest.mark.slow
def test_a_source_is_asked_once_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = EagerModel.create(tmp_path / "m", LINEAR, LINEAR.build(None).state_dict(), ROWS)
    opened: list[int] = []
    asked: list[float] = []
    models: list[weakref.ref[Predictor]] = []
    really = EagerModel.open

    @contextmanager
    def opening(self: EagerModel, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        opened.append(threads)
        with really(self, device, threads) as right:

            def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                asked.append(float(x[0, 0]))
                if x[0, 0] < 0:
                    raise ValueError("negative")
                return right(x)

            models.append(weakref.ref(predict))
            yield predict

    monkeypatch.setattr(EagerModel, "open", opening)
    one, two, refused = (torch.full((2, 20), v) for v in (1.0, 2.0, -1.0))
    context = Context(root=tmp_path)
    # As in a stage; the collections there are to look at what is made in it alone.
    with gc_frozen(), recorded_outputs(model, [(one,), (refused,), (one,)], context) as answer:
        assert asked == [1, -1]
        assert models[0]() is None, "what it was refused with holds it in memory"
        with really(model) as right:
            assert torch.equal(answer(one)[0], right(one)[0])
        with pytest.raises(ValueError, match="negative"):
            answer(refused)
        assert (len(opened), asked) == (1, [1, -1])
        answer(two)
        answer(two)
        assert (len(opened), asked) == (2, [1, -1, 2])
    monkeypatch.setattr(context_module, "MAX_BYTES", 1)
    asked.clear()
    with gc_frozen(), recorded_outputs(model, [(one,), (two,)], Context(root=tmp_path)) as answer:
        assert asked == [1]  # there is no room for more
        answer(two)
        assert asked == [1, 2]


def test_errors_are_the_same_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(2, 7, 5).double().unbind()
    a[0, 0] = b[0, 0] = torch.inf
    a[1, 1] = b[1, 1] = torch.nan
    copies = a.clone(), b.clone()
    whole = relative_error(a, b)
    monkeypatch.setattr(tensor_difference, "AT_ONCE", 4)
    assert relative_error(a, b) == pytest.approx(whole, rel=1e-12)
    for tensor, copy in zip((a, b), copies, strict=True):
        assert torch.equal(tensor.nan_to_num(0), copy.nan_to_num(0))
    b[6, 4] = torch.inf
    assert relative_error(a, b) == torch.inf
    assert relative_error(a, b[:3]) == torch.inf


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peaks here")
def test_an_export_takes_less_than_twice_its_model(
    fresh_process: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # glibc raises this threshold up to 32 MiB by itself; freed weights below it may stay on its
    # heap, 2.8 times the model or 1.6 by chance.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4000000")
    peak = fresh_process("""
import warnings; warnings.simplefilter("ignore")
from pathlib import Path
import torch
from compress import Context
from compress.artifacts.eager_model import EagerModel
from compress.profiling.rss import reset_peak, memory_kib
from compress.export import ExportOnnx

def source(size):
    torch.manual_seed(0)
    arguments = {"d_model": size, "nhead": 4, "dim_feedforward": 2 * size, "batch_first": True}
    return EagerModel.from_module(
        torch.nn.TransformerEncoderLayer(**arguments).eval(),
        factory="torch.nn:TransformerEncoderLayer",
        arguments=arguments,
        example_inputs=(torch.zeros(2, 8, size),),
    )

ExportOnnx()(source(16), Context(root=Path("small")))
model = source(1600)
before = memory_kib("VmRSS")
reset_peak()
ExportOnnx()(model, Context(root=Path("large")))
print(1024 * (memory_kib("VmHWM") - before) / model.payload_bytes)
""")
    assert 1 < float(peak) < 2  # a third of it the largest weight, which onnxruntime copies


def test_weights_that_were_counted_leave_memory_without_garbage_collection(
    graph: ir.Model, tmp_path: Path
) -> None:
    file = tmp_path / "model.onnx"
    write(graph, file)
    with gc_frozen(), gc_disabled():
        with read_briefly(file) as model:
            weights = [weakref.ref(tensor) for tensor in model.graph.initializers.tensors()]
            assert count_macs(model) == 3 * 20 * 20
        assert len(weights) == 5
        del model
        assert not any(weight() is not None for weight in weights)
