"""Hostile models for runtimes: ONNX, OpenVINO, GGUF, ExecuTorch, `torch.export`, `.mar`.

`CASES` maps a name to a function that writes one file, or an artifact whose manifest vouches for
it, into a folder and returns its path.
"""

import io
import json
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from onnx import TensorProto, external_data_helper, helper

from benchmarks.attack.cases_checkpoints import PLANTED

Case = Callable[[Path], Path]
ESCAPE = "\x1b[2J\u202e"
X = ["batch", 4]


def _signature() -> Any:
    from compress.common.signature import OutputSpec, Signature, TensorSpec

    x = TensorSpec(name="x", shape=("batch", 4))
    return Signature(inputs=(x,), outputs=(OutputSpec(name="y"),))


def _sealed(folder: Path, kind: str, **files: bytes) -> Path:
    """Seal files as an artifact of a kind; its manifest vouches for them."""
    from compress.export.executorch.stage import ExecuTorchModel
    from compress.export.gguf.stage import GgufModel
    from compress.export.onnx.stage import OnnxModel
    from compress.export.openvino.stage import OpenVINOModel

    kinds: dict[str, Any] = {
        each.kind: each for each in (ExecuTorchModel, GgufModel, OnnxModel, OpenVINOModel)
    }
    made = folder / "artifact"
    facts = {"sizes": {"batch": [1, 8]}}
    with kinds[kind].atomic_write(made, _signature(), facts=facts) as partial_folder:
        for name, content in files.items():
            (partial_folder / name).write_bytes(content)
    return made


# ONNX

NODES: dict[str, Any] = {
    "a library's operator": ("Run", ["x"], "evil.custom"),
    "an operator of Python": ("PyOp", ["x"], "ai.onnx.contrib"),
    "an operator of Microsoft's": ("MemcpyToHost", ["x"], "com.microsoft"),
    "an escape sequence": (f"Add{ESCAPE}", ["x", "x"], ""),
    "no input": ("Add", ["nothing", "x"], ""),
    "its own output": ("Add", ["y", "x"], ""),
    "too few inputs": ("Conv", ["x"], ""),
    "no operator": ("", ["x"], ""),
}
LOCATIONS = (
    "../outside/secret.txt", "/etc/passwd", "link", "pipe", "device", "", ".", "a\0b", "a" * 5000,
    "file:///etc/passwd", "..\\outside\\secret.txt", "*/_ORT_MEM_ADDR_/*",
)  # fmt: skip


def _onnx(nodes: list[Any], *weights: Any) -> bytes:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, X) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [*weights])
    opsets = [helper.make_opsetid(domain, 18) for domain in ("", "evil.custom")]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def _node(folder: Path, name: str) -> Path:
    operator, inputs, domain = NODES[name]
    file = folder / "model.onnx"
    file.write_bytes(_onnx([helper.make_node(operator, inputs, ["y"], domain=domain)]))
    return file


def _external(folder: Path, location: str, *, sealed: bool, more: str = "") -> Path:
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [4], b"0" * 16, raw=True)
    external_data_helper.set_external_data(tensor, location)
    tensor.ClearField("raw_data")
    if more:
        tensor.external_data.add(key=more, value="-1" if more == "offset" else str(2**62))
    raw = _onnx([helper.make_node("Add", ["x", "w"], ["y"])], tensor)
    if sealed:
        return _sealed(folder, "onnx", **{"model.onnx": raw})
    given = folder / "given"
    given.mkdir()
    (given / "link").symlink_to(folder / "outside" / "secret.txt")
    (given / "device").symlink_to("/dev/zero")
    os.mkfifo(given / "pipe")
    (given / "beside").write_bytes(b"0" * 16)
    (given / "model.onnx").write_bytes(raw)
    return given / "model.onnx"


def _onnx_bytes(folder: Path, seed: int) -> Path:
    one = helper.make_tensor("one", TensorProto.FLOAT, [4], [1.0] * 4)
    raw = _onnx([helper.make_node("Add", ["x", "one"], ["y"])], one)
    return _sealed(folder, "onnx", **{"model.onnx": _changed(raw, seed)})


def _changed(raw: bytes, seed: int) -> bytes:
    """Return bytes of which a few are others, or the end is missing."""
    chance, content = random.Random(seed), bytearray(raw)
    for _ in range(chance.choice((1, 2, 8))):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return bytes(content[: chance.randrange(len(content))] if seed % 3 == 0 else content)


# OpenVINO

XML = """<?xml version="1.0"?>{doctype}
<net name="m" version="11"><layers>
<layer id="0" name="x" type="Parameter" version="opset1"><data shape="?,4" element_type="f32"/>
<output><port id="0" precision="FP32" names="x"><dim>-1</dim><dim>4</dim></port></output></layer>
<layer id="1" name="w" type="Const" version="opset1">
<data element_type="f32" shape="{shape}" offset="{offset}" size="{size}"/>
<output><port id="0" precision="FP32"><dim>1</dim><dim>4</dim></port></output></layer>
<layer id="2" name="add" type="{type}" version="{opset}"><data auto_broadcast="numpy"/>
<input><port id="0"><dim>-1</dim><dim>4</dim></port><port id="1"><dim>1</dim><dim>4</dim></port>
</input><output><port id="2" precision="FP32" names="y"><dim>-1</dim><dim>4</dim></port></output>
</layer>
<layer id="3" name="y" type="Result" version="opset1">
<input><port id="0"><dim>-1</dim><dim>4</dim></port></input></layer></layers>
<edges><edge from-layer="0" from-port="0" to-layer="2" to-port="0"/>
<edge from-layer="1" from-port="0" to-layer="2" to-port="1"/>
<edge from-layer="2" from-port="2" to-layer="3" to-port="0"/></edges>{more}</net>
"""
SOUND = {
    "doctype": "", "shape": "1,4", "offset": "0", "size": "16", "type": "Add", "opset": "opset1",
    "more": "",
}  # fmt: skip
OUTSIDE = '<!DOCTYPE net [<!ENTITY e SYSTEM "../outside/secret.txt">]>'
LAUGHS = "<!DOCTYPE net [<!ENTITY a0 'ha'>{}]>".format(
    "".join(f"<!ENTITY a{i + 1} '{f'&a{i};' * 10}'>" for i in range(12))
)
GRAPHS: dict[str, dict[str, str]] = {
    "nothing hostile": {},
    "weights before the file": {"offset": "-16"},
    "weights behind the file": {"offset": str(2**40)},
    "an offset that overflows": {"offset": str(2**64 - 8)},
    "a size that overflows": {"size": str(2**64 - 1)},
    "a size of nothing": {"size": "0"},
    "a shape of a terabyte": {"shape": f"{2**20},{2**20}", "size": str(2**42)},
    "a shape that overflows": {"shape": f"{2**62},4", "size": "16"},
    "a negative shape": {"shape": "-1,4"},
    "an extension's operator": {"type": "Evil", "opset": "extension"},
    "an unknown operator": {"type": "Evil"},
    "an escape sequence": {"type": "Ev&#27;[2Jil"},
    "a file for an entity": {"doctype": OUTSIDE, "more": "<a>&e;</a>"},
    "entities of entities": {"doctype": LAUGHS, "more": "<a>&a12;</a>"},
    "a file in its information": {
        "more": '<rt_info><weights_path value="../outside/secret.txt"/></rt_info>'
    },
    "an end too early": {"more": "</net><net>"},
    "depth": {"more": "<a>" * 100_000 + "</a>" * 100_000},
    "two million attributes": {
        "more": "<a " + " ".join(f'b{i}="1"' for i in range(200_000)) + "/>"
    },
}


def _openvino(folder: Path, name: str) -> Path:
    xml = XML.format(**(SOUND | GRAPHS[name]))
    weights = struct.pack("<4f", 1, 2, 3, 4)
    return _sealed(folder, "openvino", **{"model.xml": xml.encode(), "model.bin": weights})


def _openvino_bytes(folder: Path, seed: int) -> Path:
    xml = _changed(XML.format(**SOUND).encode(), seed)
    return _sealed(folder, "openvino", **{"model.xml": xml, "model.bin": bytes(16)})


# GGUF


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _gguf(tensors: int, fields: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + body


ARCHITECTURE = _text(b"general.architecture") + struct.pack("<I", 8) + _text(b"llama")
GGUFS: dict[str, bytes] = {
    "nothing": b"",
    "four bytes": b"GGUF",
    "another magic": b"GGML" + bytes(64),
    "the other byte order": b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64),
    "version 0": _gguf(0, 0, version=0),
    "version 2**31": _gguf(0, 0, version=2**31),
    "2**62 tensors": _gguf(2**62, 0, bytes(64)),
    "2**62 fields": _gguf(0, 2**62, bytes(64)),
    "2**32 fields of nothing": _gguf(0, 2**32, bytes(2**16)),
    "a name of 2**62": _gguf(0, 1, struct.pack("<Q", 2**62)),
    "a text of 2**62": _gguf(0, 1, _text(b"general.architecture") + struct.pack("<IQ", 8, 2**62)),
    "an unknown type": _gguf(0, 1, _text(b"a") + struct.pack("<I", 99)),
    "an array of 2**62": _gguf(0, 1, _text(b"a") + struct.pack("<IIQ", 9, 0, 2**62)),
    "an array of 2**30 texts": _gguf(
        0, 1, _text(b"a") + struct.pack("<IIQ", 9, 8, 2**30) + bytes(2**20)
    ),
    "arrays of arrays": _gguf(
        0, 1, _text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000
    ),
    "a name twice": _gguf(0, 2, ARCHITECTURE * 2),
    "an escape sequence": _gguf(0, 1, _text(ESCAPE.encode()) + struct.pack("<I", 8) + _text(b"a")),
    "no UTF-8": _gguf(0, 1, _text(b"\xff\xfe") + struct.pack("<I", 8) + _text(b"\xff")),
    "no tensors": _gguf(0, 1, ARCHITECTURE),
    "an unknown architecture": _gguf(0, 1, ARCHITECTURE.replace(b"llama", b"evilx")),
    "a tensor of a terabyte": _gguf(
        1, 1, ARCHITECTURE + _text(b"w") + struct.pack("<IQQIQ", 2, 2**20, 2**20, 0, 0)
    ),
    "a tensor that overflows": _gguf(
        1, 1, ARCHITECTURE + _text(b"w") + struct.pack("<IQQIQ", 2, 2**62, 4, 0, 0)
    ),
    "2**31 dimensions": _gguf(1, 1, ARCHITECTURE + _text(b"w") + struct.pack("<I", 2**31)),
    "an unknown tensor": _gguf(
        1, 1, ARCHITECTURE + _text(b"w") + struct.pack("<IQIQ", 1, 4, 77, 0) + bytes(64)
    ),
    "a tensor behind the end": _gguf(
        1, 1, ARCHITECTURE + _text(b"w") + struct.pack("<IQIQ", 1, 4, 0, 2**60) + bytes(64)
    ),
    "no alignment": _gguf(
        0, 2, ARCHITECTURE + _text(b"general.alignment") + struct.pack("<II", 4, 0)
    ),
    "layers without end": _gguf(
        0, 2, ARCHITECTURE + _text(b"llama.block_count") + struct.pack("<II", 4, 2**31)
    ),
    "a width without end": _gguf(
        0, 2, ARCHITECTURE + _text(b"llama.embedding_length") + struct.pack("<II", 4, 2**31)
    ),
    "a template": _gguf(
        0,
        2,
        ARCHITECTURE
        + _text(b"tokenizer.chat_template")
        + struct.pack("<I", 8)
        + _text(b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    ),
}

PTES: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(4096),
    "its name alone": b"\x10\0\0\0ET12",
    "a root behind the end": struct.pack("<I", 2**31) + b"ET12" + bytes(64),
    "a table of itself": struct.pack("<I", 8) + b"ET12" + struct.pack("<i", 0) * 16,
    "an offset before the start": struct.pack("<I", 8) + b"ET12" + struct.pack("<i", 2**30) * 16,
    "an extended header": struct.pack("<I", 64) + b"ET12eh00"
    + struct.pack("<IQQ", 24, 2**62, 2**62) + bytes(64),
    "a vector of 2**31": struct.pack("<I", 16) + b"ET12" + struct.pack("<I", 2**31) * 64,
    "random bytes": struct.pack("<I", 32) + b"ET12" + random.Random(0).randbytes(4096),
}  # fmt: skip


def _file(folder: Path, kind: str, raw: bytes) -> Path:
    name = {"gguf": "model.gguf", "executorch": "model.pte"}[kind]
    return _sealed(folder, kind, **{name: raw})


# torch.export, TorchScript, TorchServe


def _program(folder: Path) -> bytes:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    if not (stored := folder.parent / "program.pt2").exists():
        torch.export.save(torch.export.export(Net(), (torch.zeros(2, 4),)), stored)
    return stored.read_bytes()


def _pt2(folder: Path, member: str, seed: int) -> Path:
    """Write a program of which one member is a pickle, or has a few bytes changed."""
    source = zipfile.ZipFile(io.BytesIO(_program(folder)))
    file = folder / "model.pt2"
    with zipfile.ZipFile(file, "w") as archive:
        for name in source.namelist():
            raw = source.read(name)
            if member in name:
                raw = _planted(folder) if seed < 0 else _changed(raw, seed) if raw else raw
            archive.writestr(name, raw)
    return file


def _pt2_more(folder: Path, name: str) -> Path:
    """Write a program with a member more."""
    raw = _program(folder)
    (folder / "model.pt2").write_bytes(raw)
    with warnings.catch_warnings(), zipfile.ZipFile(folder / "model.pt2", "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(name, _planted(folder))
    return folder / "model.pt2"


def _planted(folder: Path) -> bytes:
    return PLANTED["os.mkdir"](folder / "ran")


def _script(folder: Path, planted: str) -> Path:
    """Write a TorchScript archive whose constants or data are a pickle."""
    file = folder / "model.ts"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(4, 2), torch.zeros(1, 4)), file)
    source = zipfile.ZipFile(io.BytesIO(file.read_bytes()))
    with zipfile.ZipFile(file, "w") as archive:
        for name in source.namelist():
            hit = name.endswith(planted)
            archive.writestr(name, _planted(folder) if hit else source.read(name))
    return file


MARS: dict[str, dict[str, Any]] = {
    "no manifest": {},
    "a manifest that is a list": {"MAR-INF/MANIFEST.json": []},
    "a foreign handler": {
        "MAR-INF/MANIFEST.json": {"model": {"modelName": "m", "handler": "handler.py"}},
        "handler.py": "import os; os.mkdir('{ran}')",
    },
    "a name outside": {"MAR-INF/MANIFEST.json": {"model": {"modelName": "../../outside"}}},
    "an escape sequence": {"MAR-INF/MANIFEST.json": {"model": {"modelName": ESCAPE}}},
    "a module of ours": {
        "MAR-INF/MANIFEST.json": {"model": {"modelName": "m", "handler": "handler.py"}},
        "onnxruntime.py": "import os; os.mkdir('{ran}')",
    },
    "requirements": {
        "MAR-INF/MANIFEST.json": {"model": {"modelName": "m", "requirementsFile": "r.txt"}},
        "r.txt": "evil",
    },
    "planted probes": {"MAR-INF/MANIFEST.json": {"model": {"modelName": "m"}}, "probe.npz": None},
    "a planted model": {"MAR-INF/MANIFEST.json": {"model": {"modelName": "m"}}, "model.pt": None},
    "a planted provenance": {
        "MAR-INF/MANIFEST.json": {"model": {"modelName": "m"}},
        "provenance.json": {"artifact": {"kind": "eager"}},
    },
    "a member outside": {
        "MAR-INF/MANIFEST.json": {"model": {"modelName": "m"}},
        "../outside/planted": "0",
    },
}


def _mar(folder: Path, name: str) -> Path:
    with zipfile.ZipFile(folder / "model.mar", "w") as archive:
        for member, content in MARS[name].items():
            if content is None:
                archive.writestr(member, _planted(folder))
            elif isinstance(content, str):
                archive.writestr(member, content.replace("{ran}", str(folder / "ran")))
            else:
                archive.writestr(member, json.dumps(content))
    return folder / "model.mar"


def _mar_of_a_pickle(folder: Path) -> Path:
    (folder / "model.mar").write_bytes(pickle.dumps({"a": 1}))
    return folder / "model.mar"


CASES: dict[str, Case] = {
    **{f"model.onnx, {name}": partial(_node, name=name) for name in NODES},
    **{
        f"model.onnx, weights in {location[:30]!r}": partial(
            _external, location=location, sealed=False
        )
        for location in LOCATIONS
    },
    **{
        f"an onnx artifact, weights in {location[:30]!r}": partial(
            _external, location=location, sealed=True
        )
        for location in LOCATIONS[:4]
    },
    **{
        f"model.onnx, weights with an odd {more}": partial(
            _external, location="beside", sealed=False, more=more
        )
        for more in ("offset", "length", "checksum")
    },
    **{f"model.onnx, bytes {seed}": partial(_onnx_bytes, seed=seed) for seed in range(12)},
    **{f"model.xml, {name}": partial(_openvino, name=name) for name in GRAPHS},
    **{f"model.xml, bytes {seed}": partial(_openvino_bytes, seed=seed) for seed in range(16)},
    **{f"model.gguf, {name}": partial(_file, kind="gguf", raw=raw) for name, raw in GGUFS.items()},
    **{
        f"model.pte, {name}": partial(_file, kind="executorch", raw=raw)
        for name, raw in PTES.items()
    },
    **{
        f"model.pt2, a pickle as {member}": partial(_pt2, member=member, seed=-1)
        for member in ("model.json", "weights", "constants", "archive_format", "sample_inputs")
    },
    **{
        f"model.pt2, its graph, bytes {seed}": partial(_pt2, member="models/", seed=seed)
        for seed in range(12)
    },
    **{
        f"model.pt2, {name[-20:]} more": partial(_pt2_more, name=name)
        for name in (
            "program/data/aotinductor/model/evil.so", "program/extra/evil.pkl",
            "program/data/constants/planted.pt", "../../outside/planted",
            "program/data/weights/model.pt",
        )
    },
    **{
        f"model.ts, a pickle as {member}": partial(_script, planted=member)
        for member in ("data.pkl", "constants.pkl", "code/__torch__/torch/nn/modules/linear.py")
    },
    **{f"model.mar, {name}": partial(_mar, name=name) for name in MARS},
    "model.mar, a pickle": _mar_of_a_pickle,
}  # fmt: skip
