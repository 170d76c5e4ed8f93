"""Files that ask for memory or time out of proportion to their size, each written by a function.

Each function writes one case into a folder, and returns the checkpoint, model or OCI layout to give
to the toolkit. :func:`pipeline_for` writes a pipeline file that reads a case of `MODELS`; the cases
of `LAYOUTS` are for `compress package --image --base`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import platform
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from compress.checkpoint.safetensors_io import MOST_TENSORS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HUGE = 12 << 30
"""Bytes that a case asks for: more than any reader of a small file may take."""
SEVERAL = 3 << 29
"""float32 numbers, 6 GiB, that a case asks for while it is called."""
BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 16,
}


def pipeline_for(model: Path) -> Path:
    """Write a pipeline file beside a case that reads it, and return it."""
    inputs = "[{name: x, shape: [batch, 4]}]"
    if (model / "config.json").is_file():
        inputs = "[{name: input_ids, shape: [batch, 8], dtype: int64}]"
        source = f"huggingface: {model.name}"
    elif model.suffix in (".onnx", ".pt2", ".ts"):
        source = f"file: {model.name}"
    else:
        arguments = "arguments: {in_features: 4, out_features: 2}"
        source = f"factory: torch.nn:Linear\n  {arguments}\n  checkpoint: {model.name}"
    file = model.parent / "pipeline.yaml"
    stage = {".onnx": "export_openvino", ".ts": "package_torchserve"}.get(
        model.suffix, "export_onnx"
    )
    stages = f"[{{stage: {stage}}}]"
    file.write_text(f"version: 1\nmodel:\n  {source}\n  inputs: {inputs}\nstages: {stages}\n")
    return file


# Checkpoints


class _Call:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def pt_bytearray(folder: Path) -> Path:
    """Write a zip checkpoint whose pickle calls ``bytearray(12 << 30)``, which is allowed."""
    torch.save({"weight": _Call(bytearray, HUGE)}, folder / "model.pt")
    return folder / "model.pt"


def pt_old_bytearray(folder: Path) -> Path:
    """Write the same in torch's format before zip archives."""
    content = {"weight": _Call(bytearray, HUGE)}
    torch.save(content, folder / "model.pt", _use_new_zipfile_serialization=False)
    return folder / "model.pt"


def pt_many_bytearrays(folder: Path) -> Path:
    """Write a checkpoint that calls ``bytearray`` 400 times for 32 MiB each."""
    torch.save([_Call(bytearray, 2**25 + i) for i in range(400)], folder / "model.pt")
    return folder / "model.pt"


def pt_tensor_of_a_size(folder: Path) -> Path:
    """Write a checkpoint that calls ``torch.FloatTensor`` with a size, for 12 GiB."""
    torch.save({"weight": _Call(torch.FloatTensor, HUGE // 4)}, folder / "model.pt")
    return folder / "model.pt"


def pt_expanded_tensor(folder: Path) -> Path:
    """Write a tensor of one number and stride 0 that claims 64 GiB."""
    torch.save({"weight": torch.ones(1).expand(2**34)}, folder / "model.pt")
    return folder / "model.pt"


def pt_sparse_tensor(folder: Path) -> Path:
    """Write a sparse tensor with one entry and 2**60 zeros."""
    sparse = torch.sparse_coo_tensor([[1], [1]], [1.0], (2**30, 2**30))
    torch.save({"weight": sparse, "bias": torch.zeros(2)}, folder / "model.pt")
    return folder / "model.pt"


def pt_meta_tensor(folder: Path) -> Path:
    """Write a tensor without content that claims 4 TiB."""
    torch.save({"weight": torch.empty(2**40, device="meta")}, folder / "model.pt")
    return folder / "model.pt"


def pt_shared_parts(folder: Path) -> Path:
    """Write lists that hold the next one twice, 40 deep: 2**40 paths to one tensor."""
    nested: Any = [torch.zeros(2)]
    for _ in range(40):
        nested = [nested, nested]
    torch.save({"model": nested}, folder / "model.pt")
    return folder / "model.pt"


def pt_contains_itself(folder: Path) -> Path:
    """Write a dictionary that holds itself."""
    state: dict[str, Any] = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}
    state["model"] = state
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def pt_nested_deep(folder: Path) -> Path:
    """Write lists nested 100,000 deep, which recursion cannot follow."""
    raw = b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * 100_000 + b"a" * 99_999 + b"s."
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", raw)
        archive.writestr("archive/version", "3\n")
    return folder / "model.pt"


def pt_endless_keys(folder: Path) -> Path:
    """Write a pickle that has a list of 1,000 lists extend itself by them, again and again."""
    raw = b"\x80\x02]q\x00" + b"(" + b"h\x00" * 1000 + b"e" + b"(h\x00h\x00e" * 1000 + b"."
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", raw)
        archive.writestr("archive/version", "3\n")
    return folder / "model.pt"


def zip_bomb(folder: Path) -> Path:
    """Write a checkpoint whose pickle is compressed, and unfolds to 4 GiB."""
    with zipfile.ZipFile(folder / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as stream:
            for _ in range(256):
                stream.write(b"\0" * 2**24)
        archive.writestr("archive/version", "3\n")
    return folder / "model.pt"


def zip_in_zip(folder: Path) -> Path:
    """Write a zip bomb as the stored member of another archive."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**28)
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", inner.getvalue())
        archive.writestr("archive/version", "3\n")
    return folder / "model.pt"


def zip_of_many(folder: Path) -> Path:
    """Write an archive of 200,000 empty members."""
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        for number in range(200_000):
            archive.writestr(f"archive/data/{number}", b"")
    return folder / "model.pt"


def _distributed(folder: Path, raw: bytes) -> Path:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes(raw)
    return checkpoint


def dcp_memo_index(folder: Path) -> Path:
    """Write an index of 9 bytes that stores one object at memo index 2**29 - 1."""
    return _distributed(folder, b"\x80\x02]r\xff\xff\xff\x1f.")


def dcp_memo_index_in_a_string(folder: Path) -> Path:
    """Write the same behind bytes that hold many opcodes, so that the file is larger."""
    return _distributed(folder, b"\x80\x03B\x00\x10\x00\x00" + b"." * 4096 + b"r\xff\xff\xff\x0f.")


def dcp_bytearray(folder: Path) -> Path:
    """Write an index whose opcode BYTEARRAY8 announces 12 GiB."""
    return _distributed(folder, b"\x80\x05\x96" + HUGE.to_bytes(8, "little") + b".")


def dcp_frame(folder: Path) -> Path:
    """Write an index whose frame announces 12 GiB."""
    return _distributed(folder, b"\x80\x04\x95" + HUGE.to_bytes(8, "little") + b".")


def dcp_many_marks(folder: Path) -> Path:
    """Write an index of four million marks and lists."""
    return _distributed(folder, b"\x80\x02" + b"(]" * 4_000_000 + b".")


def dcp_sizes(folder: Path) -> Path:
    """Write a checkpoint whose index claims a tensor of 2**40 numbers in a file of few bytes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    checkpoint = folder / "checkpoint"
    dcp.save({"weight": torch.zeros(2, 4)}, checkpoint_id=checkpoint)
    index = checkpoint / ".metadata"
    metadata = pickle.loads(index.read_bytes())  # our own, of the line before
    (entry,) = metadata.state_dict_metadata.values()
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = entry.chunks[0].sizes = torch.Size([2**20, 2**20])
    index.write_bytes(pickle.dumps(metadata))
    return checkpoint


def dcp_chunk(folder: Path) -> Path:
    """Write a checkpoint whose tensor's own pickle calls ``bytearray(12 << 30)``."""
    import torch.distributed.checkpoint as dcp

    checkpoint = folder / "checkpoint"
    dcp.save({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, checkpoint_id=checkpoint)
    for file in checkpoint.glob("*.distcp"):
        chunk = io.BytesIO()
        torch.save(_Call(bytearray, HUGE), chunk)
        index = pickle.loads((checkpoint / ".metadata").read_bytes())  # our own
        for info in index.storage_data.values():
            info.offset, info.length = 0, len(chunk.getvalue())
        (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
        file.write_bytes(chunk.getvalue())
    return checkpoint


def _safetensors(folder: Path, header: bytes, content: bytes = b"", length: int = 0) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes((length or len(header)).to_bytes(8, "little") + header + content)
    return file


def safetensors_length(folder: Path) -> Path:
    """Write a header that announces 2**62 bytes."""
    return _safetensors(folder, b"{}", length=2**62)


def safetensors_nested(folder: Path) -> Path:
    """Write a header of lists nested ten million deep."""
    return _safetensors(folder, b'{"a":' + b"[" * 10_000_000)


def safetensors_many(folder: Path) -> Path:
    """Write a header of a million empty tensors."""
    return _empty_tensors(folder, 10**6)


def safetensors_most(folder: Path) -> Path:
    """Write a header of as many empty tensors as are read."""
    return _empty_tensors(folder, MOST_TENSORS)


def _empty_tensors(folder: Path, count: int) -> Path:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return _safetensors(folder, ("{" + ",".join(entry % i for i in range(count)) + "}").encode())


def safetensors_sizes(folder: Path) -> Path:
    """Write a tensor of 2**62 times 4 numbers, whose bytes overflow to 0."""
    entry = {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}
    return _safetensors(folder, json.dumps({"weight": entry}).encode())


def safetensors_hole(folder: Path) -> Path:
    """Write a tensor of 64 GiB in a sparse file, which takes no space on the disk."""
    entry = {"dtype": "F32", "shape": [2**34], "data_offsets": [0, 2**36]}
    header = json.dumps({"weight": entry}).encode()
    file = _safetensors(folder, header)
    with file.open("r+b") as stream:
        stream.truncate(8 + len(header) + 2**36)
    return file


# Folders of Hugging Face


def _hugging_face(folder: Path, **changes: Any) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(BERT | changes))
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"weight": entry, "__metadata__": {"format": "pt"}}).encode()
    return _safetensors(model, header, b"\0" * 4).parent


def hf_labels(folder: Path) -> Path:
    """Write a config with a billion labels, for each of which transformers makes a name."""
    return _hugging_face(folder, num_labels=10**9)


def hf_layers(folder: Path) -> Path:
    """Write a config with ten million layers."""
    return _hugging_face(folder, num_hidden_layers=10**7)


def hf_vocabulary(folder: Path) -> Path:
    """Write a config with an embedding table of 4 TiB."""
    return _hugging_face(folder, vocab_size=2**30, hidden_size=2**10)


def hf_hidden_size(folder: Path) -> Path:
    """Write a config whose weights have more bytes than 64 bits count."""
    return _hugging_face(folder, hidden_size=2**33, intermediate_size=2**33)


def hf_positions(folder: Path) -> Path:
    """Write a config with ten billion positions, of which a model keeps a list."""
    return _hugging_face(folder, max_position_embeddings=10**10)


def hf_causal_mask(folder: Path) -> Path:
    """Write a config of GPT-2 with a million positions, whose mask has their square."""
    changes = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 10**6}
    return _hugging_face(folder, n_embd=8, n_layer=1, n_head=1, **changes)


def hf_experts(folder: Path) -> Path:
    """Write a config of Mixtral with ten million experts."""
    changes = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    return _hugging_face(folder, num_local_experts=10**7, num_key_value_heads=1, **changes)


def hf_nested_layers(folder: Path) -> Path:
    """Write a config of CLIP whose part for texts has ten million layers."""
    changes = {"model_type": "clip", "architectures": ["CLIPModel"]}
    return _hugging_face(folder, text_config={"num_hidden_layers": 10**7}, **changes)


def hf_stages(folder: Path) -> Path:
    """Write a config of ResNet with a stage of ten million blocks."""
    changes = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
    depths, sizes = [1, 1, 1, 10**7], [8, 8, 8, 8]
    return _hugging_face(folder, depths=depths, hidden_sizes=sizes, **changes)


def hf_large_config(folder: Path) -> Path:
    """Write a config.json of 256 MiB."""
    model = _hugging_face(folder)
    config = json.dumps(BERT)[:-1] + ', "more": [' + "[]," * (2**28 // 3) + "0]}"
    (model / "config.json").write_text(config)
    return model


def hf_nested_config(folder: Path) -> Path:
    """Write a config.json nested a million deep."""
    model = _hugging_face(folder)
    (model / "config.json").write_text('{"model_type":' + '{"a":' * 10**6 + "0" + "}" * 10**6 + "}")
    return model


def hf_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json of 1 GiB of merges beside a model that fits."""
    from transformers import BertConfig, BertForSequenceClassification

    model = folder / "model"
    BertForSequenceClassification(BertConfig(**BERT)).save_pretrained(model)
    with (model / "tokenizer.json").open("w") as stream:
        stream.write('{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},')
        stream.write('"merges":[')
        block = ",".join(['"a a"'] * 2**20)
        for _ in range(2**30 // len(block)):
            stream.write(block + ",")
        stream.write('"a a"]}}')
    return model


# ONNX files


def _onnx(folder: Path, nodes: list[Any], *weights: Any, **more: Any) -> Path:
    shape = more.pop("shape", ["batch", 4])
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    result = helper.make_tensor_value_info("y", more.pop("dtype", TensorProto.FLOAT), None)
    graph = helper.make_graph(nodes, "main", [given], [result], list(weights))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, **more)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def _integers(name: str, *values: int) -> Any:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def _node(operator: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), outputs.split(), **attributes)


def onnx_functions(folder: Path) -> Path:
    """Write 40 functions, each of which calls the next twice: 2**39 operators inlined."""
    functions = []
    for level in range(40):
        name = f"f{level + 1}"
        inner = [
            helper.make_node(name, [a], [b], domain="local") for a, b in (("a", "b"), ("b", "c"))
        ]
        if level == 39:
            inner = [_node("Neg", "a", "c")]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
        functions.append(helper.make_function("local", f"f{level}", ["a"], ["c"], inner, opsets))
    start = helper.make_node("f0", ["x"], ["y"], domain="local")
    return _onnx(folder, [start], functions=functions)


def onnx_function_of_itself(folder: Path) -> Path:
    """Write a function that calls itself."""
    inner = helper.make_node("f", ["a"], ["c"], domain="local")
    opsets = [helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "f", ["a"], ["c"], [inner], opsets)
    start = helper.make_node("f", ["x"], ["y"], domain="local")
    return _onnx(folder, [start], functions=[function])


def onnx_expand(folder: Path) -> Path:
    """Write an Expand to 6 GiB."""
    nodes = [_node("ReduceSum", "x", "s", keepdims=0), _node("Expand", "s size")]
    return _onnx(folder, nodes, _integers("size", SEVERAL))


def onnx_constant_of_shape(folder: Path) -> Path:
    """Write a ConstantOfShape of 6 GiB, which is folded when the file is opened."""
    nodes = [_node("ConstantOfShape", "size", "c"), _node("Add", "x c")]
    return _onnx(folder, nodes, _integers("size", SEVERAL // 4, 4))


def onnx_tile(folder: Path) -> Path:
    """Write a Tile to 6 GiB."""
    return _onnx(folder, [_node("Tile", "x n")], _integers("n", 1, SEVERAL // 8))


def onnx_range(folder: Path) -> Path:
    """Write a Range of 12 GiB."""
    weights = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("a", 0), ("d", 1))]
    nodes = [
        _node("Shape", "x", "shape"),
        _node("ReduceSum", "shape", "sum", keepdims=0),
        _node("Mul", "sum many", "end"),
        _node("Range", "a end d", "y"),
    ]
    end = numpy_helper.from_array(np.array(SEVERAL // 4, np.int64), "many")
    return _onnx(folder, nodes, *weights, end, dtype=TensorProto.INT64)


def onnx_pad(folder: Path) -> Path:
    """Write a Pad to 6 GiB."""
    return _onnx(folder, [_node("Pad", "x pads")], _integers("pads", 0, 0, 0, SEVERAL // 2))


def onnx_one_hot(folder: Path) -> Path:
    """Write a OneHot of a depth that takes 12 GiB."""
    nodes = [_node("Cast", "x", "i", to=TensorProto.INT64), _node("OneHot", "i depth v")]
    values = numpy_helper.from_array(np.array([0, 1], np.float32), "v")
    return _onnx(folder, nodes, _integers("depth", SEVERAL // 4), values)


def onnx_resize(folder: Path) -> Path:
    """Write a Resize to 6 GiB."""
    nodes = [_node("Unsqueeze", "x axes", "u"), _node("Resize", "u  s", mode="nearest")]
    nodes[1] = helper.make_node("Resize", ["u", "", "s"], ["y"], mode="nearest")
    scales = numpy_helper.from_array(np.array([1, 1, 2**14, 2**14], np.float32), "s")
    return _onnx(folder, nodes, _integers("axes", 0, 1), scales)


def onnx_doubling(folder: Path) -> Path:
    """Write 40 Concats of a tensor with itself."""
    nodes = [_node("Concat", f"t{i} t{i}", f"t{i + 1}", axis=1) for i in range(40)]
    nodes[0].input[:], nodes[-1].output[:] = ["x", "x"], ["y"]
    return _onnx(folder, nodes)


def onnx_outer_product(folder: Path) -> Path:
    """Write the outer product of an input with itself after it was made longer, 64 GiB."""
    nodes = [
        _node("Tile", "x n", "t"),
        _node("Reshape", "t column", "c"),
        _node("Reshape", "t row", "r"),
        _node("MatMul", "c r"),
    ]
    weights = (_integers("n", 1, 2**14), _integers("column", -1, 1), _integers("row", 1, -1))
    return _onnx(folder, nodes, *weights)


def _loop(folder: Path, step: list[Any], state: str) -> Path:
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [*step, _node("Identity", "go", "still")],
        "body",
        [
            value("number", TensorProto.INT64, []),
            value("go", TensorProto.BOOL, []),
            value("v", TensorProto.FLOAT, None),
        ],
        [value("still", TensorProto.BOOL, []), value(state, TensorProto.FLOAT, None)],
    )
    yes = numpy_helper.from_array(np.array(True), "yes")
    return _onnx(folder, [helper.make_node("Loop", ["", "yes", "x"], ["y"], body=body)], yes)


def onnx_endless_loop(folder: Path) -> Path:
    """Write a Loop without a limit whose condition stays true."""
    return _loop(folder, [_node("Neg", "v", "w")], "w")


def onnx_growing_loop(folder: Path) -> Path:
    """Write a Loop that doubles a tensor for ever."""
    return _loop(folder, [_node("Concat", "v v", "w", axis=1)], "w")


def onnx_weight_sizes(folder: Path) -> Path:
    """Write a weight of 2**40 numbers without any bytes."""
    weight = TensorProto(name="w", dims=[2**20, 2**20], data_type=TensorProto.FLOAT)
    return _onnx(folder, [_node("Add", "x w")], weight)


def onnx_external_length(folder: Path) -> Path:
    """Write a weight whose file beside it should have 4 TiB, and has 16 bytes."""
    (folder / "weights").write_bytes(b"\0" * 16)
    weight = TensorProto(name="w", dims=[2**20, 2**20], data_type=TensorProto.FLOAT)
    weight.data_location = TensorProto.EXTERNAL
    for key, content in (("location", "weights"), ("offset", "0"), ("length", str(2**42))):
        weight.external_data.add(key=key, value=content)
    return _onnx(folder, [_node("Add", "x w")], weight)


def onnx_sparse_weight(folder: Path) -> Path:
    """Write a sparse weight of one number among 2**31."""
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    sparse = helper.make_sparse_tensor(values, _integers("i", 0), [2**29, 4])
    return _onnx(folder, [_node("Constant", "", "w", sparse_value=sparse), _node("Add", "x w")])


def onnx_input_sizes(folder: Path) -> Path:
    """Write a model whose input has 2**40 numbers."""
    return _onnx(folder, [_node("Neg", "x")], shape=[2**20, 2**20])


def onnx_nested_branches(folder: Path) -> Path:
    """Write an If in an If, 2,000 deep."""
    value = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
    raw = helper.make_graph([_node("Identity", "x", "r")], "g", [], [value]).SerializeToString()

    def field(number: int, content: bytes) -> bytes:
        length, encoded = len(content), bytearray()
        while length > 127:
            encoded.append(length & 127 | 128)
            length >>= 7
        return bytes([number << 3 | 2, *encoded, length]) + content

    for _ in range(2000):
        attributes = b""
        for name in (b"then_branch", b"else_branch")[:1]:
            attributes += field(5, field(1, name) + field(6, raw) + b"\xa0\x01\x05")
        node = field(1, b"c") + field(2, b"r") + field(4, b"If") + attributes
        raw = field(1, node) + field(2, b"g") + field(12, value.SerializeToString())
    opset = field(8, b"\x10\x11")
    (folder / "model.onnx").write_bytes(b"\x08\x08" + field(7, raw) + opset)
    return folder / "model.onnx"


# Programs of torch.export and TorchScript


class _Adds(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((7, 4), 1.0).sum()


def _program(folder: Path, change: Callable[[str], str], record: str = "models/model.json") -> Path:
    """Write a program with one of its records changed as text."""
    from torch.export.pt2_archive import PT2ArchiveReader

    dynamic = ({0: torch.export.Dim("batch", min=2, max=77)},)
    exported = torch.export.export(_Adds(), (torch.ones(3, 4),), dynamic_shapes=dynamic)
    written = io.BytesIO()
    torch.export.save(exported, written)
    written.seek(0)
    reader = PT2ArchiveReader(written)
    with (folder / "model.pt2").open("wb") as stream:
        writer = torch._C.PyTorchFileWriter(stream)
        writer.set_min_version(6)
        for name in sorted(reader.get_file_names()):
            if name.startswith(".data/") or name == "byteorder":
                continue
            content = reader.read_bytes(name)
            if name == record:
                changed = change(content.decode()).encode()
                assert changed != content
                content = changed
            writer.write_record(name, content, len(content))
        writer.write_end_of_file()
    return folder / "model.pt2"


def pt2_sizes(folder: Path) -> Path:
    """Write a program that makes a tensor of 6 GiB when it is called."""
    import re

    def enlarge(text: str) -> str:
        return re.sub(r'("as_ints":\s*\[)7,', rf"\g<1>{SEVERAL // 4},", text)

    return _program(folder, enlarge)


def pt2_power(folder: Path) -> Path:
    """Write a program whose size is a power with a billion digits."""
    import re

    return _program(
        folder, lambda t: re.sub(r'"expr_str":\s*"[^"]*"', '"expr_str": "Pow(3, 5000000000)"', t)
    )


def pt2_nested(folder: Path) -> Path:
    """Write a program whose graph is JSON nested a million deep."""
    return _program(folder, lambda text: "[" * 10**6)


def pt2_nested_expression(folder: Path) -> Path:
    """Write a program whose size is an expression nested 20,000 deep."""
    import re

    deep = "Add(1," * 20_000 + "1" + ")" * 20_000
    return _program(folder, lambda t: re.sub(r'"expr_str":\s*"[^"]*"', f'"expr_str": "{deep}"', t))


def ts_endless(folder: Path) -> Path:
    """Write a TorchScript program that never returns."""

    class Endless(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while bool((x == x).any()):
                x = x * 1.0
            return x

    torch.jit.script(Endless()).save(folder / "model.ts")
    return folder / "model.ts"


def ts_sizes(folder: Path) -> Path:
    """Write a TorchScript program that makes a tensor of 6 GiB."""

    class Large(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(1610612736).sum()

    torch.jit.script(Large()).save(folder / "model.ts")
    return folder / "model.ts"


def ts_nested(folder: Path) -> Path:
    """Write a TorchScript program with an expression nested 200,000 deep."""

    class Small(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    whole = folder / "whole.ts"
    torch.jit.script(Small()).save(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(folder / "model.ts", "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if b"torch.add(x, 1)" in content:
                nested = b"(" * 200_000 + b"x" + b")" * 200_000
                content = content.replace(b"torch.add(x, 1)", b"torch.add(" + nested + b", 1)")
            new.writestr(name, content)
    return folder / "model.ts"


# Base images


def _blob(layout: Path, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def _json_blob(layout: Path, kind: str, content: Any) -> dict[str, Any]:
    media = f"application/vnd.oci.image.{kind}.v1+json"
    return {"mediaType": media, **_blob(layout, json.dumps(content).encode())}


def _layout(folder: Path) -> Path:
    layout = folder / "base"
    layout.mkdir()
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return layout


def _image(layout: Path, layer: bytes, **config: Any) -> Path:
    packed = _blob(layout, layer)
    packed["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    system = {"os": "linux", "architecture": machine, "rootfs": {"diff_ids": []}}
    image = {"config": _json_blob(layout, "config", system | config), "layers": [packed]}
    index = {"manifests": [_json_blob(layout, "manifest", image)]}
    (layout / "index.json").write_text(json.dumps(index))
    return layout


def _layer(size: int = 0) -> bytes:
    """Return a layer with this Python, after a file of zeros of a size."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        if size:
            entry = tarfile.TarInfo("zeros")
            entry.size = size
            archive.addfile(entry, _Zeros())  # type: ignore[arg-type]  # it reads like a file
        archive.addfile(tarfile.TarInfo(f"bin/python{sys.version_info[0]}.{sys.version_info[1]}"))
    return packed.getvalue()


class _Zeros:
    def read(self, size: int) -> bytes:
        return b"\0" * size


def oci_doubling(folder: Path) -> Path:
    """Write an index that names the next one twice, 40 deep."""
    layout = _layout(folder)
    inner = _json_blob(layout, "index", {"manifests": []})
    for _ in range(40):
        inner = _json_blob(layout, "index", {"manifests": [inner, inner]})
    (layout / "index.json").write_text(json.dumps({"manifests": [inner]}))
    return layout


def oci_chain(folder: Path) -> Path:
    """Write 20,000 indexes, each of which names the next."""
    layout = _layout(folder)
    inner = _json_blob(layout, "index", {"manifests": []})
    for _ in range(20_000):
        inner = _json_blob(layout, "index", {"manifests": [inner]})
    (layout / "index.json").write_text(json.dumps({"manifests": [inner]}))
    return layout


def oci_large_index(folder: Path) -> Path:
    """Write an index.json of 256 MiB."""
    layout = _layout(folder)
    (layout / "index.json").write_text('{"manifests": [' + "[]," * (2**28 // 3) + "0]}")
    return layout


def oci_nested_index(folder: Path) -> Path:
    """Write an index.json nested a million deep."""
    layout = _layout(folder)
    (layout / "index.json").write_text('{"manifests": ' + "[" * 10**6)
    return layout


def oci_layer_bomb(folder: Path) -> Path:
    """Write a layer of 50 MiB that unfolds to 12 GiB."""
    return _image(_layout(folder), _layer(HUGE))


def oci_layer_of_many(folder: Path, files: int = 5_000_000) -> Path:
    """Write a layer of five million empty files, which a list of them would hold in memory."""
    packed = io.BytesIO()
    block = tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT)
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as stream:
        for _ in range(files // 1000):
            stream.write(block * 1000)
        stream.write(b"\0" * 1024)
    return _image(_layout(folder), packed.getvalue())


def oci_malformed(folder: Path) -> Path:
    """Write an index whose manifests are a number."""
    layout = _layout(folder)
    (layout / "index.json").write_text('{"manifests": 5}')
    return layout


MODELS = tuple(
    function
    for name, function in list(globals().items())
    if name.startswith(("pt_", "zip_", "dcp_", "safetensors_", "hf_", "onnx_", "pt2_", "ts_"))
)
LAYOUTS = tuple(function for name, function in list(globals().items()) if name.startswith("oci_"))
