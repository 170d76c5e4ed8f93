import io
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.graph.torch_export import export_program
from tests.forging import forge

IMAGE = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
TOKENS = Signature(inputs=(TensorSpec(name="ids", shape=("batch", "length"), dtype="int64"),))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.bn(self.conv(image)).relu().mean((2, 3)))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        return (self.words(ids) + places).to(torch.float64)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.linear(x), "b": x.view(x.shape[0], 2, 2)}


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 4)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def sealed(path: Path, module: nn.Module, signature: Signature = IMAGE) -> GraphModel:
    return GraphModel.create(path, export_program(module, signature), signature)


def test_answers_are_the_modules_at_every_batch_size(tmp_path: Path) -> None:
    module = net()
    with sealed(tmp_path / "g", module).open() as predict, torch.inference_mode():
        for batch in (1, 3, 8):
            (image,) = IMAGE.example(batch)
            assert torch.equal(predict(image)[0], module(image))


def test_outputs_in_a_dict_are_flattened(tmp_path: Path) -> None:
    module = Named().eval()
    with sealed(tmp_path / "g", module, ROWS).open() as predict:
        (x,) = ROWS.example(5)
        a, b = predict(x)
    assert torch.equal(a, module(x)["a"])
    assert b.shape == (5, 2, 2)


def test_counts_are_the_modules(tmp_path: Path) -> None:
    graph = sealed(tmp_path / "g", net())
    assert graph.parameters() == sum(p.numel() for p in net().parameters())
    assert graph.macs() == 4 * 9 * 36 + 4 * 3


def test_it_is_read_once_to_count_at_the_sizes_of_val(tmp_path: Path, monkeypatch) -> None:
    graph, read = sealed(tmp_path / "g", Positions().eval(), TOKENS), []
    program = GraphModel.program
    monkeypatch.setattr(GraphModel, "program", lambda self: read.append(1) or program(self))
    graph.macs({"length": 12})
    assert graph.parameters() == 9 * 4 + 16 * 4
    assert len(read) == 1


@pytest.mark.slow
def test_equal_programs_give_equal_bytes_in_any_process(tmp_path: Path, fresh_torch) -> None:
    here = sealed(tmp_path / "here", net())
    there = fresh_torch(
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "import test_graph_model as t\n"
        f"print(t.sealed(t.Path({str(tmp_path / 'there')!r}), t.net()).digest)"
    )
    assert there == here.digest
    assert Path(__file__).name.encode() not in here.payload_path.read_bytes()


def test_a_fixed_batch_is_refused_by_name() -> None:
    with pytest.raises(StageFailed, match="axis 'batch' is baked in: the model's code fixes it"):
        export_program(Fixed(), ROWS)


class AtMostFour(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            raise ValueError("four at most")
        return x * 2


def test_a_limited_batch_is_refused_with_its_limits() -> None:
    with pytest.raises(StageFailed, match=r"axis 'batch' .* only some sizes.* where batch <= 4;"):
        export_program(AtMostFour(), ROWS)


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    graph = sealed(tmp_path / "g", net())
    content = graph.payload_path.read_bytes()
    forge(graph.path, "model.pt2", content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(ArtifactInvalid, match=r"model\.pt2 is not the file that was sealed"):
        graph.program()
    message = r"model\.pt2: not a (torch\.export program|readable archive)"
    with pytest.raises(ArtifactInvalid, match=message):
        GraphModel.from_directory(graph.path).program()


class Payload:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def pickled(file: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save((Payload(file),), buffer)
    return buffer.getvalue()


def change(records: dict[str, bytes], name: str, edit: Callable[[dict], object]) -> None:
    content = json.loads(records[name])
    edit(content)
    records[name] = json.dumps(content).encode()


GRAPH = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


def in_sample_inputs(records: dict[str, bytes], file: Path) -> None:
    records["data/sample_inputs/model.pt"] = pickled(file)


def in_weight(records: dict[str, bytes], file: Path) -> None:
    entry = next(iter(json.loads(records[WEIGHTS])["config"].values()))
    records[f"data/weights/{entry['path_name']}"] = pickled(file)
    change(
        records, WEIGHTS, lambda c: next(iter(c["config"].values())).update({"use_pickle": True})
    )


def in_constant(records: dict[str, bytes], file: Path) -> None:
    records["data/constants/opaque_obj_0"] = pickle.dumps(Payload(file))
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}
    change(records, CONSTANTS, lambda c: c["config"].update({"c": entry | {"tensor_meta": None}}))


def in_legacy_weights(records: dict[str, bytes], file: Path) -> None:
    records["data/weights/model.pt"] = pickled(file)


def in_guards(records: dict[str, bytes], file: Path) -> None:
    code = f"__import__('pathlib').Path({str(file)!r}).touch() is None"
    change(records, GRAPH, lambda g: g.update({"guards_code": [code]}))


def in_shape_expression(records: dict[str, bytes], file: Path) -> None:
    code = f"__import__('pathlib').Path({str(file)!r}).touch() or 2"

    def edit(graph: dict) -> None:
        for value in graph["graph_module"]["graph"]["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = code

    change(records, GRAPH, edit)


def in_bounds(records: dict[str, bytes], file: Path) -> None:
    code = f"4*__import__('pathlib').Path({str(file)!r}).touch()"
    bounds = {"min_val": 2, "max_val": None}
    change(records, GRAPH, lambda g: g["range_constraints"].update({code: bounds}))


def in_node_name(records: dict[str, bytes], file: Path) -> None:
    code = f"x = __import__('pathlib').Path({str(file)!r}).touch() ; y"
    name = json.loads(records[GRAPH])["graph_module"]["graph"]["inputs"][-1]["as_tensor"]["name"]
    records[GRAPH] = records[GRAPH].replace(f'"{name}"'.encode(), json.dumps(code).encode())


def in_operator(records: dict[str, bytes], file: Path) -> None:
    def edit(graph: dict) -> None:
        graph["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.serialization.os.system"

    change(records, GRAPH, edit)


def in_library(records: dict[str, bytes], file: Path) -> None:
    records["data/aotinductor/model/model.so"] = b"\x7fELF"


@pytest.mark.parametrize(
    "plant",
    [
        in_sample_inputs,
        in_weight,
        in_constant,
        in_legacy_weights,
        in_guards,
        in_shape_expression,
        in_bounds,
        in_node_name,
        in_operator,
        in_library,
    ],
)
def test_planted_code_is_refused_and_never_runs(
    tmp_path: Path, plant: Callable[[dict[str, bytes], Path], None]
) -> None:
    graph = sealed(tmp_path / "g", net())
    reader = torch._C.PyTorchFileReader(str(graph.payload_path))
    skipped = ("byteorder", ".data/version", ".data/serialization_id")
    records = {n: reader.get_record(n) for n in reader.get_all_records() if n not in skipped}
    planted = tmp_path / "planted"
    plant(records, planted)
    file = tmp_path / "planted.pt2"
    writer = torch._C.PyTorchFileWriter(str(file))
    for name, record in records.items():
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    forge(graph.path, "model.pt2", file.read_bytes())
    with pytest.raises(ArtifactInvalid, match=r"model\.pt2 is not the file that was sealed"):
        graph.program()
    with pytest.raises(ArtifactInvalid, match=r"model\.pt2: .*it was not read"):
        GraphModel.from_directory(graph.path).program()
    assert not planted.exists()


def test_a_program_makes_its_constants_on_its_device(tmp_path: Path) -> None:
    model = GraphModel.create(
        tmp_path / "graph", export_program(Positions().eval(), TOKENS), TOKENS
    )
    program = model.program("meta")
    made = [node.kwargs["device"] for node in program.graph.nodes if "device" in node.kwargs]
    assert len(made) >= 2  # of the positions, and where the dtype changes
    assert {str(device) for device in made} == {"meta"}
    assert {tensor.device.type for tensor in program.state_dict.values()} == {"meta"}
    assert next(model.load().parameters()).device.type == "cpu"
