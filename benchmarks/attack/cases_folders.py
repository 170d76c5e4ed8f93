"""Hostile folders and files: what they name lies elsewhere, on a hub, or is code of a runtime's.

Each function writes one below a folder, and returns the model to give: a Hugging Face folder
(`model.huggingface`), an artifact's folder, or a file (`model.file`). Beside it lies `outside`, of
which nothing may be read; `ran` may never come to be.
"""

import json
import shutil
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ESCAPE = "\x1b[2J\x1b[31m"
"""Clears a terminal and writes in red."""


def index_of_weights_outside(folder: Path) -> Path:
    """The index names weights of the folder above."""
    model = _bert(folder)
    _move_outside(model, WEIGHTS)
    return _indexed(model, "../outside/model.safetensors")


def index_of_weights_by_an_absolute_path(folder: Path) -> Path:
    """The index names weights by their whole path."""
    model = _bert(folder)
    return _indexed(model, str(_move_outside(model, WEIGHTS)))


def index_of_a_link_outside(folder: Path) -> Path:
    """The index names a file beside it, which is a link."""
    model = _bert(folder)
    (model / "part.safetensors").symlink_to(_move_outside(model, WEIGHTS))
    return _indexed(model, "part.safetensors")


def weights_are_a_link_outside(folder: Path) -> Path:
    """The weights are a link to a file of another folder."""
    return _linked(folder, WEIGHTS)


def config_is_a_link_outside(folder: Path) -> Path:
    """The config is a link to a file of another folder."""
    return _linked(folder, "config.json")


def tokenizer_is_a_link_outside(folder: Path) -> Path:
    """The tokenizer is a link to a file of another folder."""
    return _linked(folder, "tokenizer.json")


def templates_are_a_link_outside(folder: Path) -> Path:
    """The folder of chat templates is a link to another folder."""
    model = _bert(folder)
    (folder / "outside" / "secret.jinja").write_text("secret")
    (model / "additional_chat_templates").symlink_to(folder / "outside")
    return model


def weights_are_a_link_to_itself(folder: Path) -> Path:
    """The weights are a link to themselves."""
    model = _bert(folder)
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to(WEIGHTS)
    return model


def snapshot_whose_blobs_are_elsewhere(folder: Path) -> Path:
    """Laid out as Hugging Face's cache, whose folder of blobs is a link to another folder."""
    model = _bert(folder)
    snapshot = folder / "cache" / "snapshots" / "1"
    shutil.move(model, snapshot)
    _move_outside(snapshot, WEIGHTS, folder)
    (folder / "cache" / "blobs").symlink_to(folder / "outside")
    (snapshot / WEIGHTS).symlink_to(Path("../../blobs", WEIGHTS))
    return snapshot


def backbone_of_a_hub(folder: Path) -> Path:
    """The config names a backbone of a hub."""
    return _of_type(folder, "upernet", backbone="evil/backbone", use_pretrained_backbone=True)


def backbone_of_a_name_that_a_hub_is_asked_for(folder: Path) -> Path:
    """The config names a backbone that transformers looks for on the hub first."""
    return _of_type(folder, "upernet", backbone="evilbackbone", use_pretrained_backbone=True)


def backbone_of_timm_on_a_hub(folder: Path) -> Path:
    """The config of a backbone names an architecture that timm would download."""
    inner = {"model_type": "timm_backbone", "backbone": "hf-hub:evil/backbone"}
    return _of_type(folder, "upernet", backbone_config=inner)


def architecture_of_timm_in_another_folder(folder: Path) -> Path:
    """The config names an architecture of timm by a folder."""
    place = f"local-dir:{folder / 'outside'}"
    return _of_type(folder, "timm_wrapper", architecture=place, model_args={})


def checkpoint_of_timm_in_another_folder(folder: Path) -> Path:
    """The config gives timm the path of a checkpoint, which is a pickle."""
    weights = {"checkpoint_path": str(folder / "outside" / "secret.pth")}
    return _of_type(folder, "timm_wrapper", architecture="resnet18", model_args=weights)


def attention_of_a_hub_in_a_part(folder: Path) -> Path:
    """The config of a part of the model names attention code of a hub."""
    return _of_type(folder, "clip", text_config={"attn_implementation": "evil/attention"})


def adapter_of_another_model(folder: Path) -> Path:
    """The folder holds an adapter, too, whose base model is on a hub."""
    model = _bert(folder)
    content = {"base_model_name_or_path": "evil/base", "peft_type": "LORA"}
    (model / "adapter_config.json").write_text(json.dumps(content))
    return model


def code_of_its_own(folder: Path) -> Path:
    """The config names code of the folder."""
    model = _bert(folder)
    (model / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    own = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoTokenizer": "own.Tokenizer"}
    return _changed(model, auto_map=own, model_type="of_its_own")


def genai_with_a_library(folder: Path) -> Path:
    """The settings name a library, which onnxruntime-genai would load."""
    return _genai(folder, custom_ops_library=str(folder / "outside" / "planted.so"))


def genai_with_a_profile(folder: Path) -> Path:
    """The settings have onnxruntime write a profile, at any path."""
    return _genai(folder, enable_profiling=str(folder / "ran"))


def genai_with_a_provider(folder: Path) -> Path:
    """The settings name a provider, whose library onnxruntime-genai would load."""
    options = {"backend_path": str(folder / "outside" / "planted.so")}
    return _genai(folder, provider_options=[{"QNN": options}])


def executorch_with_a_part_for_another_backend(folder: Path) -> Path:
    """A part of the program is for Qualcomm's backend, which loads the library that it names."""
    from compress.common.signature import Signature, TensorSpec
    from compress.export.executorch.stage import ExecuTorchModel

    made, x = folder / "executorch", TensorSpec(name="x", shape=("batch", 4), dtype="float32")
    facts = {"sizes": {"batch": [1, 2]}}
    with ExecuTorchModel.atomic_write(made, Signature(inputs=(x,)), facts=facts) as partial:
        (partial / ExecuTorchModel.payload).write_bytes(_program_for("QnnBackend"))
    return made


def packed_by_a_function_of_the_standard_library(folder: Path) -> Path:
    """The manifest of a packed model names a function that makes a folder."""
    from compress.artifacts.recipe import Recipe
    from compress.artifacts.streaming.packed_model import ROUNDS, PackedModel
    from compress.common.signature import Signature, TensorSpec

    ids = TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64")
    recipe = Recipe(factory="os:mkdir", arguments={"path": str(folder / "ran")})
    made, facts = folder / "packed", {ROUNDS: False}
    with PackedModel.atomic_write(
        made, Signature(inputs=(ids,)), recipe=recipe, facts=facts
    ) as partial:
        header = b'{"__metadata__":{"format":"pt"}}'
        (partial / PackedModel.payload).write_bytes(len(header).to_bytes(8, "little") + header)
    return made


def triton_with_the_python_backend(folder: Path) -> Path:
    """The configuration asks for Triton's backend that runs the code beside the model."""
    from compress.common.signature import Signature, TensorSpec
    from compress.serve.repository import TritonRepository

    made, x = folder / "triton", TensorSpec(name="x", shape=("batch", 4), dtype="float32")
    facts = {"model_name": "model", "model_file": "model/1/model.onnx"}
    with TritonRepository.atomic_write(made, Signature(inputs=(x,)), facts=facts) as partial:
        version = partial / "model" / "1"
        version.mkdir(parents=True)
        shutil.copy(_onnx(folder), version)
        (version / "model.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
        (partial / "model" / "config.pbtxt").write_text('name: "model"\nbackend: "python"\n')
    return made


def onnx_that_writes_to_the_terminal(folder: Path) -> Path:
    """An operator with escape sequences in its name fails when it is called."""
    return _onnx(folder, shape=(7, 5))


def onnx_with_options_of_its_session(folder: Path) -> Path:
    """The file's metadata ask for a profile, which onnxruntime would write."""
    options = {"session_options": {"enable_profiling": 1, "intra_op_num_threads": 64}}
    return _onnx(folder, metadata={"ort_config": json.dumps(options)})


def _program_for(backend: str) -> bytes:
    """Return an ExecuTorch program without operators, of which a backend computes a part."""
    import flatbuffers

    def table(field: int, value: int) -> int:
        builder.StartObject(8)
        builder.PrependUOffsetTRelativeSlot(field, value, 0)
        return builder.EndObject()

    def tables(inner: int) -> int:
        builder.StartVector(4, 1, 4)
        builder.PrependUOffsetTRelative(inner)
        return builder.EndVector()

    builder = flatbuffers.Builder()
    delegate = table(0, builder.CreateString(backend))
    plan = table(7, tables(delegate))
    builder.Finish(table(1, tables(plan)), file_identifier=b"ET12")
    return bytes(builder.Output())


def _bert(folder: Path) -> Path:
    """Write a small model with its tokenizer, and `outside` beside it."""
    import tokenizers
    import transformers

    model = folder / "model"
    config = transformers.BertConfig(num_labels=3, **SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(model)
    words = {"[UNK]": 0, "[PAD]": 1, "a": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]")).save(
        str(model / "tokenizer.json")
    )
    (folder / "outside").mkdir()
    return model


def _move_outside(model: Path, name: str, folder: Path | None = None) -> Path:
    place = (folder or model.parent) / "outside" / name
    shutil.move(model / name, place)
    return place


def _linked(folder: Path, name: str) -> Path:
    model = _bert(folder)
    (model / name).symlink_to(_move_outside(model, name))
    return model


def _indexed(model: Path, file: str) -> Path:
    import safetensors

    with safetensors.safe_open(model / file, "pt") as opened:
        names = dict.fromkeys(opened.keys(), file)
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return model


def _of_type(folder: Path, kind: str, **entries: Any) -> Path:
    return _changed(_bert(folder), model_type=kind, architectures=None, **entries)


def _changed(model: Path, **entries: Any) -> Path:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, **entries}))
    return model


def _genai(folder: Path, **options: Any) -> Path:
    """Write a sealed artifact with session options that nobody exported."""
    from compress.common.signature import Signature, TensorSpec
    from compress.export.genai.runtime import CONFIG, Decoder, GenaiConfig, Model, Search
    from compress.export.genai.stage import GenaiModel

    (folder / "outside").mkdir()
    sizes = ("head_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    decoder = Decoder(**dict.fromkeys((*sizes, "num_hidden_layers"), 1))
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    model = Model(**ends, context_length=8, vocab_size=8, decoder=decoder)
    content = GenaiConfig(model=model, search=Search(max_length=8)).model_dump(mode="json")
    content["model"]["decoder"]["session_options"] |= options
    ids = TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64")
    facts = {"context": 8, "vocabulary": 8}
    made = folder / "genai"
    with GenaiModel.atomic_write(made, Signature(inputs=(ids,)), facts=facts) as partial:
        (partial / GenaiModel.payload).write_bytes(b"")
        (partial / CONFIG).write_text(json.dumps(content))
    return made


def _onnx(folder: Path, shape: tuple[int, ...] = (-1, 4), metadata: dict[str, str] | None = None):
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy")
    name = f"{ESCAPE}shape"
    node = helper.make_node("Reshape", ["x", name], ["y"], name=name)
    sizes = numpy_helper.from_array(np.array(shape), name)
    graph = helper.make_graph([node], "graph", [x], [y], initializer=[sizes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, metadata or {})
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"
