"""Hostile texts: pipeline files, manifests, configs of Hugging Face folders, and OCI layouts.

`CASES` maps a name to a function that writes one file or folder into a folder and returns its path.
"""

import copy
import hashlib
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attack.cases_memory import BERT

Case = Callable[[Path], Path]
ESCAPE = "x\x1b[2J\x1b[32m\u202e\r\nerror: nothing"
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "\0", ESCAPE, "\ud800",
    "../outside/secret.txt", "/etc/passwd", "https://example.com/x", "a" * 100_000, [], {}, [[]],
    {"": None}, ["a"] * 10_000,
)  # fmt: skip
"""Values that a place in a JSON document may have instead of its own."""

PIPELINE = """\
version: 1
model:
  factory: torch.nn:Linear
  arguments: {in_features: 4, out_features: 2}
  inputs: [{name: x, shape: [batch, 4]}]
stages: [{stage: export_onnx}]
"""
YAMLS: dict[str, str] = {
    "python/object/apply": "!!python/object/apply:os.mkdir [{ran}]\n",
    "python/object/new": "version: !!python/object/new:os.mkdir [{ran}]\n",
    "python/name": PIPELINE.replace("version: 1", "version: !!python/name:os.system"),
    "python/module": PIPELINE.replace("version: 1", "version: !!python/module:antigravity"),
    "aliases of aliases": "a0: &a0 [x, x]\n"
    + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
    "an alias of itself": "version: &a [*a]\n",
    "merges of merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n" for i in range(30)),
    "depth": "version: " + "[" * 5_000,
    "depth by dashes": "- " * 5_000,
    "a key twice": PIPELINE + "version: 2\n",
    "two documents": PIPELINE + "---\n" + PIPELINE,
    "digits": PIPELINE.replace("version: 1", "version: " + "9" * 100_000),
    "sexagesimal": PIPELINE.replace("version: 1", "version: " + "1:" * 50_000 + "1"),
    "a date": PIPELINE.replace("version: 1", "version: 2001-13-45"),
    "a set": PIPELINE.replace("version: 1", "version: !!set {a}"),
    "binary": PIPELINE.replace("version: 1", "version: !!binary aGk="),
    "a NUL": PIPELINE + "\0",
    "escapes": PIPELINE + '"\\e[2J": 1\n',
    "lone surrogates": PIPELINE + '"\\ud800": 1\n',
    "other line ends": PIPELINE.replace("\n", "\u2028"),
    "a directive": "%YAML 9.9\n---\n" + PIPELINE,
    "an anchor of a megabyte": "version: &" + "a" * 2**20 + " 1\n",
    "two megabytes": PIPELINE + "#" * 2**21,
    "a file of another folder": PIPELINE.replace(
        "version: 1", "version: 1\ninclude: ../outside/secret.txt"
    ),
    "a checkpoint on a network": PIPELINE.replace(
        "  inputs", "  checkpoint: https://example.com/model.pt\n  inputs"
    ),
    "a checkpoint in s3": PIPELINE.replace("  inputs", "  checkpoint: s3://a/b.pt\n  inputs"),
    "a hub's name for a model": PIPELINE.replace(
        "factory: torch.nn:Linear\n  arguments: {in_features: 4, out_features: 2}",
        "huggingface: bert-base-uncased",
    ),
    "shapes without end": PIPELINE.replace("[batch, 4]", "[" + "4, " * 20_000 + "4]"),
    "a shape of 2**62": PIPELINE.replace("[batch, 4]", f"[batch, {2**62}]"),
    "a layer of a terabyte": PIPELINE.replace("in_features: 4", "in_features: 1000000000000"),
    "a matrix without end": PIPELINE + "matrix:\n"
    + "".join(f"  k{i}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n" for i in range(12)),
    "no UTF-8": PIPELINE + "# \udcff\n",
}  # fmt: skip


def _yaml(folder: Path, name: str) -> Path:
    file = folder / "pipeline.yaml"
    text = YAMLS[name].replace("{ran}", json.dumps(str(folder / "ran")))
    file.write_bytes(text.encode(errors="surrogateescape" if "\udcff" in text else "strict"))
    return file


def _replaced(value: Any, chance: random.Random) -> Any:
    """Return a copy of a JSON document with an odd value in one place, or a place too many."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, each in [*items]:
            places.append((node, key))
            if isinstance(each, dict | list):
                collect(each)

    collect(value)
    node, key = chance.choice(places)
    if isinstance(node, dict) and chance.random() < 0.15:
        del node[key]
    elif isinstance(node, dict) and chance.random() < 0.15:
        node[ESCAPE] = chance.choice(ODD)
    else:
        node[key] = chance.choice(ODD)
    return value


def sound_artifact(place: Path) -> Path:
    """Seal `x + 1` as an artifact of `export_onnx`."""
    from onnx import TensorProto, helper

    from compress.artifacts.artifact import Step
    from compress.common.signature import OutputSpec, Signature, TensorSpec
    from compress.export.onnx.stage import OnnxModel

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy")
    one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "g", [x], [y], [one])
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="y"),)
    )
    lineage = (Step(stage="export_onnx", settings={"opset": 18}, inputs={"input": "0" * 64}),)
    facts = {"class_names": ["a", "b"], "macs": 4}
    made = place / "artifact"
    with OnnxModel.atomic_write(made, signature, lineage=lineage, facts=facts) as partial_folder:
        (partial_folder / OnnxModel.payload).write_bytes(model.SerializeToString())
    return made


def _manifest(folder: Path, seed: int) -> Path:
    made = sound_artifact(folder)
    file = made / "manifest.json"
    changed = _replaced(json.loads(file.read_text()), random.Random(seed))
    file.unlink()
    file.write_text(json.dumps(changed))
    return made


def _another_kind(folder: Path, kind: str) -> Path:
    """Let a manifest say that its files are of another kind."""
    made = sound_artifact(folder)
    file = made / "manifest.json"
    content = json.loads(file.read_text()) | {"kind": kind}
    file.unlink()
    file.write_text(json.dumps(content))
    return made


def _in_the_folder(folder: Path, what: str) -> Path:
    """Put into an artifact what does not belong there."""
    made = sound_artifact(folder)
    model, manifest, secret = made / "model.onnx", made / "manifest.json", folder / "outside"
    if what == "a link":
        model.unlink()
        model.symlink_to(secret / "secret.txt")
    elif what == "a linked manifest":
        manifest.unlink()
        manifest.symlink_to(secret / "secret.txt")
    elif what == "a pipe":
        model.unlink()
        os.mkfifo(model)
    elif what == "a device":
        model.unlink()
        model.symlink_to("/dev/zero")
    elif what == "a file more":
        (made / "model.bin").write_bytes(b"0")
    elif what == "code":
        (made / "onnxruntime.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    elif what == "a manifest without end":
        manifest.unlink()
        manifest.write_text("[" * 1_000_000)
    elif what == "a manifest of 100 MiB":
        manifest.unlink()
        manifest.write_text(" " * 100 * 2**20)
    elif what == "a key twice":
        text = manifest.read_text()
        manifest.unlink()
        manifest.write_text(text.replace("{", '{"kind": "eager", ', 1))
    return made


IN_THE_FOLDER = (
    "a link", "a linked manifest", "a pipe", "a device", "a file more", "code",
    "a manifest without end", "a manifest of 100 MiB", "a key twice",
)  # fmt: skip
KINDS = (
    "eager", "graph", "aot", "executorch", "genai", "gguf", "openvino", "tensorrt", "torchscript",
    "kserve", "triton", "torchserve", "compressed-tensors", "packed", "streamed", ESCAPE, "",
)  # fmt: skip
CONFIG = {
    **BERT,
    "hidden_act": "gelu",
    "id2label": {"0": "a", "1": "b"},
    "label2id": {"a": 0, "b": 1},
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "layer_norm_eps": 1e-12,
}


def _hugging_face(folder: Path, seed: int) -> Path:
    """Write a folder whose config has an odd value."""
    from transformers import BertConfig, BertForSequenceClassification

    model = folder / "model"
    BertForSequenceClassification(BertConfig(**CONFIG)).save_pretrained(model)
    changed = _replaced(CONFIG, random.Random(seed))
    (model / "config.json").write_text(json.dumps(changed))
    return model


def _layout(folder: Path, seed: int) -> Path:
    """Write an OCI layout with an odd value in its index, manifest or config; digests fit."""
    base = folder / "base"
    blobs = base / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    chance = random.Random(seed)
    changed = seed % 4

    def add(number: int, content: Any, kind: str) -> dict[str, Any]:
        if number == changed and not isinstance(content, bytes):
            content = _replaced(content, chance)
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        digest = hashlib.sha256(raw).hexdigest()
        (blobs / digest).write_bytes(raw)
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(raw)}

    layer = add(9, b"\0" * 1024, "layer.v1.tar")
    config = {
        "os": "linux",
        "architecture": "amd64",
        "config": {"Env": ["PATH=/usr/bin"], "Cmd": ["python3"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    image = {
        "schemaVersion": 2,
        "config": add(0, config, "config.v1+json"),
        "layers": [layer],
    }
    manifest = add(1, image, "manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [manifest]}
    nested = add(2, index, "index.v1+json")
    outer: Any = {"schemaVersion": 2, "manifests": [nested]}
    if changed == 3:
        outer = _replaced(outer, chance)
    (base / "index.json").write_text(json.dumps(outer))
    (base / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return base


CASES: dict[str, Case] = {
    **{f"a pipeline file with {name}": partial(_yaml, name=name) for name in YAMLS},
    **{f"a manifest, place {seed}": partial(_manifest, seed=seed) for seed in range(60)},
    **{f"an artifact as {kind!r}": partial(_another_kind, kind=kind) for kind in KINDS},
    **{f"an artifact with {what}": partial(_in_the_folder, what=what) for what in IN_THE_FOLDER},
    **{f"config.json, place {seed}": partial(_hugging_face, seed=seed) for seed in range(60)},
    **{f"an OCI layout, place {seed}": partial(_layout, seed=seed) for seed in range(40)},
}
