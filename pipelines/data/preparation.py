"""Finds how a model's raw inputs are prepared, and the files that tell it to servers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from compress.artifacts import hf_folder
from compress.artifacts.carried_files import CONFIG, IMAGES, TOKENIZER, names_in
from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.export.imported.exported_files import class_names_of
from compress.pipelines.config.data_spec import FileData
from compress.pipelines.config.model_spec import HuggingFaceModel, ModelFile, TimmModel
from compress.pipelines.data.samples import Preparation
from compress.serve.packaging.request_forms import (
    RESAMPLE,
    AudioInput,
    ImageInput,
    TextInput,
    processor_input,
)

if TYPE_CHECKING:
    from compress.pipelines.config.pipeline import PipelineConfig


def find_preparation(
    pipeline: PipelineConfig, inputs: tuple[TensorSpec, ...] | None
) -> tuple[Preparation, dict[str, bytes]]:
    """Return how the files of a `data:` section are prepared, and what artifacts carry of that.

    `inputs` are the model's, where they are known before a sample is read. PipelineInvalid where
    neither the section nor the model says how images or texts become inputs.
    """
    spec, model, carried = pipeline.data, pipeline.model, {}
    assert isinstance(spec, FileData)
    if isinstance(model, HuggingFaceModel):
        folder = pipeline.folder / model.huggingface
        module = hf_folder.read_architecture(folder, model.task, model.labels)
        carried = hf_folder.files_to_carry(folder, module)
    names = names_in(json.loads(carried.get(CONFIG, b"{}")))
    if isinstance(model, ModelFile):
        names = class_names_of(model.kind, pipeline.folder / model.file)
    try:
        if spec.form is TextInput:
            settings, tokenizer = _text_settings(pipeline, spec, inputs, carried)
            carried[TOKENIZER] = tokenizer
            return _preparation("text", settings, inputs or (), names, tokenizer.decode()), carried
        if spec.form is None:
            return Preparation(class_names=names), carried
        form = _declared_form(pipeline, spec, carried)
        inputs = inputs or (form.default_input(),)
        settings = form.handler_settings(Signature(inputs=inputs))
        if isinstance(form, AudioInput) and settings["samples"] is None and not form.extractor:
            raise StageFailed("give `seconds`, or the size of the model's input: a batch has one")
    except StageFailed as error:
        raise PipelineInvalid(f"data.prepare: {error}") from error
    if spec.prepare or IMAGES not in carried:  # the model's own file is left as it is
        carried[IMAGES] = _json(_processor_config(form, settings))
    return _preparation(form.kind, settings, inputs, names), carried


def _preparation(
    form: str,
    settings: Mapping[str, Any],
    inputs: tuple[TensorSpec, ...],
    names: tuple[str, ...],
    tokenizer: str = "",
) -> Preparation:
    described = tuple(Signature(inputs=inputs).input_descriptions())
    return Preparation(form, settings, described, tokenizer, names)


def _declared_form(
    pipeline: PipelineConfig, spec: FileData, carried: Mapping[str, bytes]
) -> ImageInput | AudioInput:
    """Return how images or sounds are prepared, by the section or the model's own files."""
    given, is_sound = spec.prepare, spec.form is AudioInput
    form: Any = given
    if IMAGES in carried and (is_sound or not given):
        form = processor_input(json.loads(carried[IMAGES]))
    wanted = AudioInput if is_sound else ImageInput
    if isinstance(form, wanted) or isinstance(form := given, wanted):
        update = given.model_dump(exclude_unset=True) if is_sound and given else {}
        return form.model_copy(update=update)
    if isinstance(pipeline.model, TimmModel) and not is_sound:
        return _timm_form(pipeline.model)
    what, example = "images", "{size: 224, shorter_side: 256, mean: [0.485, 0.456, 0.406], std: "
    example += "[0.229, 0.224, 0.225]}"
    if is_sound:
        what, example = "sounds", "{rate: 16000, seconds: 1}"
    raise PipelineInvalid(
        f"data.prepare: nothing says how {what} become the model's input; give what it was trained "
        f"with, such as `prepare: {example}`"
    )


def _timm_form(spec: TimmModel) -> ImageInput:
    """Return what timm's own evaluation does with images, by the architecture's configuration."""
    import torch

    from compress.artifacts.libraries.timm_model import build

    with torch.device("meta"):
        config: Any = build(spec.timm, **spec.arguments).pretrained_cfg
    height, width = config["input_size"][1:]
    found = {"size": (height, width), "mean": config["mean"], "std": config["std"]}
    share, mode = config.get("crop_pct") or 1.0, config.get("crop_mode") or "center"
    if mode == "center" and height == width:
        found["shorter_side"] = math.floor(height / share)
    elif mode == "squash":
        found["squashed_to"] = tuple(math.floor(side / share) for side in (height, width))
    else:
        raise PipelineInvalid(
            f"data.prepare: {spec.timm} crops images of {height} x {width} as {mode!r}, which is "
            "not computed here; give `prepare`"
        )
    return ImageInput.model_validate({**found, "resample": config["interpolation"]})


def _processor_config(form: ImageInput | AudioInput, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a `preprocessor_config.json`, which `processor_input` reads."""
    if isinstance(form, AudioInput):
        kind = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1}
        kind |= {"padding_value": 0.0, "do_normalize": form.normalize, **form.extractor}
        return {**kind, "sampling_rate": form.rate, "seconds": form.seconds}
    height, width = settings["size"]
    config: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "resample": RESAMPLE.index(settings["resample"]),
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": settings["mean"],
        "image_std": settings["std"],
        "data_format": "channels_last" if settings["layout"] == "hwc" else "channels_first",
        "crop_rounding": settings["crop_rounding"],
    }
    whole = {"height": height, "width": width}
    if settings["shorter_side"] is None and settings["squashed_to"] is None:
        return {**config, "size": whole}
    if settings["shorter_side"] is not None:
        config["size"] = {"shortest_edge": settings["shorter_side"]}
    else:
        config["size"] = dict(zip(("height", "width"), settings["squashed_to"], strict=True))
    # Of transformers, ViTImageProcessor cuts nothing out.
    config["image_processor_type"] = "CLIPImageProcessor"
    return {**config, "do_center_crop": True, "crop_size": whole}


def _text_settings(
    pipeline: PipelineConfig,
    spec: FileData,
    inputs: tuple[TensorSpec, ...] | None,
    carried: Mapping[str, bytes],
) -> tuple[dict[str, Any], bytes]:
    if inputs is None:
        raise PipelineInvalid(
            "data: texts become the inputs that the model declares; give `model.inputs`"
        )
    with TemporaryDirectory(prefix="compress-tokenizer-") as folder:
        if isinstance(spec.prepare, TextInput):
            form = spec.prepare.resolve_paths(pipeline.folder)
        elif TOKENIZER in carried:
            (file := Path(folder) / TOKENIZER).write_bytes(carried[TOKENIZER])
            form = TextInput(tokenizer=str(file))
        else:
            raise PipelineInvalid(
                "data.prepare: nothing says how texts become the model's inputs; give `prepare: "
                "{tokenizer: tokenizer.json}`"
            )
        settings = form.handler_settings(Signature(inputs=inputs))
        return settings, Path(form.tokenizer).read_bytes()


def files_for_classes(names: tuple[str, ...], carried: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the carried files with the names of the classes, where they hold no others."""
    config: dict[str, Any] = json.loads(carried.get(CONFIG, b"{}"))
    if not names or names_in(config):
        return dict(carried)
    config["id2label"] = {str(i): name for i, name in enumerate(names)}
    config["label2id"] = {name: i for i, name in enumerate(names)}
    return {**carried, CONFIG: _json(config)}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
