"""What a server takes and answers beside tensors, as an artifact's carried files say it.

A model from a Hugging Face folder carries its tokenizer, its image preprocessing and the names of
its classes; the built-in server and TorchServe's handler preprocess with the same code.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.artifacts.carried_files import CONFIG, IMAGES, TOKENIZER
from compress.common.errors import StageFailed
from compress.serve.packaging.request_forms import ImageInput, TextInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature

logger = logging.getLogger(__name__)

STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
"""Steps of transformers' image processors that are computed here."""
WITHOUT_EFFECT = ("do_convert_rgb", "do_reduce_labels")
"""Steps that change no answer: every image is read in the model's channels."""
RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's filters by their numbers."""
TOP_LABELS = 5
"""How many labels of each row are answered where no setting says."""
MULTILABEL = "multi_label_classification"
"""transformers' `problem_type` of models whose classes do not exclude each other."""
WARPED_FROM = 384
"""ConvNeXT's processor squashes from this size on, and crops below it."""


@dataclass(frozen=True)
class RequestForms:
    """Settings of texts, images and class names."""

    class_names: tuple[str, ...] = ()
    image: ImageInput | None = None
    text: TextInput | None = None

    def handler_settings(self, signature: Signature) -> dict[str, Any]:
        """Return the handler's settings of images and texts, for a model of this signature."""
        forms = (("image", self.image), ("text", self.text))
        return {name: form.handler_settings(signature) for name, form in forms if form}


def forms_of(artifact: Artifact) -> RequestForms:
    """Return what an artifact's carried files say; what does not fit its inputs is left out.

    Raises:
        ArtifactInvalid: a carried file was changed after sealing.
    """
    image = text = None
    try:
        image = image_input(artifact.carried_json(IMAGES))
        if image:
            _require(image)
            image.handler_settings(artifact.signature)
    except StageFailed as error:
        logger.warning("%s: %s is not used: %s", artifact.path, IMAGES, error)
        image = None
    if TOKENIZER in artifact.manifest.files:
        artifact.check_files(hashed=[TOKENIZER])
        text = TextInput(tokenizer=str(artifact.path / TOKENIZER))
        try:
            _require(text)
            text.handler_settings(artifact.signature)
        except StageFailed as error:
            logger.warning("%s: %s is not used: %s", artifact.path, TOKENIZER, error)
            text = None
    return RequestForms(artifact.class_names, image, text)


def _require(settings: ImageInput | TextInput) -> None:
    missing = [each for each in settings.requirements if each.missing()]
    if missing:
        raise StageFailed(f"{missing[0].what} is not installed ({missing[0].install})")


def image_input(config: Mapping[str, Any] | None) -> ImageInput | None:
    """Return the settings of a `preprocessor_config.json`, or None without one.

    Raises:
        StageFailed: it has a step that is not computed here.
    """
    if config is None:
        return None
    kind = str(config.get("image_processor_type", ""))
    others = {name for name in config if name.startswith("do_")} - {*STEPS, *WITHOUT_EFFECT}
    unknown = sorted(name for name in others if config[name])
    unknown += [name for name in ("rescale_offset", "include_top") if config.get(name)]
    if unknown:
        raise StageFailed(f"image: {kind} does {', '.join(unknown)}, which is not computed here")
    settings: dict[str, Any] = {"crop_rounding": "down", **_sizes(config, kind)}
    resample = config.get("resample")
    if resample is not None:
        settings["resample"] = RESAMPLE[resample]
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    mean, std = [0.0], [1.0]
    if config.get("do_normalize"):
        mean, std = config["image_mean"], config["image_std"]
    # (pixel * factor - mean) / std, for pixels that are divided by 255 first.
    settings["mean"] = [value / (255 * factor) for value in mean]
    settings["std"] = [value / (255 * factor) for value in std]
    return ImageInput.model_validate(settings)


def _sizes(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return `size`, `shorter_side` and `squashed_to` of an image processor's settings."""
    size = (config.get("size") or {}) if config.get("do_resize") else {}
    crop = (config.get("crop_size") or {}) if config.get("do_center_crop") else {}
    sizes: dict[str, Any] = {}
    if {"height", "width"} <= crop.keys():
        sizes["size"] = (crop["height"], crop["width"])
    elif crop or not size:
        raise StageFailed(f"image: {kind} resizes to {size} and crops to {crop}")
    if size.keys() == {"height", "width"}:
        sizes["squashed_to" if crop else "size"] = (size["height"], size["width"])
        return sizes
    if size.keys() != {"shortest_edge"}:
        raise StageFailed(f"image: {kind} resizes to {dict(size)}, which is not computed here")
    edge = size["shortest_edge"]
    if "crop_pct" in config and kind.startswith("ConvNext"):
        whole = {"size": (edge, edge)}
        if edge < WARPED_FROM:
            return whole | {"shorter_side": int(edge / (config["crop_pct"] or 224 / 256))}
        return whole
    if config.get("crop_pct") or not crop:
        raise StageFailed(f"image: {kind} resizes to {dict(size)} without cropping to `crop_size`")
    return sizes | {"shorter_side": edge}


def class_settings(
    artifact: Artifact, names: tuple[str, ...], top: int, scores: npt.NDArray[Any]
) -> dict[str, Any] | None:
    """Return the handler's settings of class names for a first output like these scores.

    None without names, or if the scores are not [rows, classes] with so many classes.
    """
    if not names or scores.ndim != 2 or scores.shape[1] != len(names):
        return None
    config = artifact.carried_json(CONFIG) or {}
    probable = are_probabilities(scores)
    several = not probable and config.get("problem_type") == MULTILABEL
    settings = {"names": [*names], "top": min(top, len(names))}
    return {**settings, "softmax": not probable and not several} | (
        {"sigmoid": True} if several else {}
    )


def are_probabilities(scores: npt.NDArray[Any]) -> bool:
    """Return whether the rows of an output are probabilities rather than logits."""
    rows = scores.astype("float64")
    return bool((rows >= 0).all() and (abs(rows.sum(axis=-1) - 1) <= 1e-3).all())
