"""What a server takes and answers beside tensors, as an artifact's Hugging Face files say it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import JsonValue, field_validator

from compress.artifacts.carried_files import CONFIG, IMAGES, TOKENIZER
from compress.common.atomic_files import sha256_of
from compress.common.config import Count, Positive, Settings
from compress.common.errors import ArtifactInvalid, StageFailed, raised_as
from compress.common.requirements import Requirement, pip_install
from compress.common.signature import Signature, TensorSpec

if TYPE_CHECKING:
    import numpy.typing as npt

    from compress.artifacts.artifact import Artifact


Field = Literal["ids", "attention_mask", "type_ids"]
FIELDS: dict[str, Field] = {
    "input_ids": "ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
}
logger = logging.getLogger(__name__)
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
"""Steps of transformers' image processors that are computed here."""
WITHOUT_EFFECT = ("do_convert_rgb", "do_reduce_labels")
"""Steps that change no answer: every image is read in the model's channels."""
RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's, by number
EXTRACTORS = ("ASTFeatureExtractor", "WhisperFeatureExtractor")
"""Transformers' classes that compute spectra of sounds, each of one length."""
COLOURS = 3  # channels of images for a model that declares no inputs
TOP_LABELS = 5  # how many labels of each row are answered where no setting says


class ImageInput(Settings):
    """The model's input is an image: PNG and JPEG bodies are taken."""

    size: tuple[Count, Count] | None = None
    """Height and width, or one number for both; by default those of the model's input."""
    shorter_side: Count | None = None
    """The shorter side is scaled to this and the centre of `size` cut out; when left out, the image
    is squashed to `size`."""
    squashed_to: tuple[Count, Count] | None = None
    """Height and width that the image is squashed to before the centre of `size` is cut out."""
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] = "bilinear"
    """Filter with which the image is scaled."""
    crop_rounding: Literal["nearest", "down"] = "nearest"
    """Where the centre begins if an odd number of pixels is cut off: torchvision rounds to the
    nearest (even) pixel, transformers down."""
    layout: Literal["chw", "hwc"] = "chw"
    """Order of the input's axes behind the batch: channels, height, width."""
    mean: tuple[float, ...] = (0.0,)
    """Taken from pixels, which go from 0 to 1: one number, or one for each channel."""
    std: tuple[Positive, ...] = (1.0,)
    """What they are divided by then."""

    kind: ClassVar[str] = "image"
    requirements: ClassVar[tuple[Requirement, ...]] = (
        Requirement(what="PIL", install=pip_install("serve")),
    )

    @field_validator("size", mode="before")
    @classmethod
    def _is_square(cls, size: object) -> object:
        return (size, size) if type(size) is int else size

    def default_input(self) -> TensorSpec:
        """Return the input of a model that declares none; StageFailed without a size."""
        if self.size is None:
            raise StageFailed("give the `size` of the model's images")
        shape = [*self.size, COLOURS] if self.layout == "hwc" else [COLOURS, *self.size]
        return TensorSpec(name="input", shape=("batch", *shape), dtype="float32")

    def handler_settings(self, signature: Signature) -> dict[str, Any]:
        """Return the handler's settings; StageFailed if the model does not take one image a row."""
        spec, *others = signature.inputs
        axes = dict(zip(self.layout, spec.shape[1:], strict=False))
        mode = {1: "L", 3: "RGB"}.get(axes.get("c"))  # type: ignore[arg-type]  # or a named axis
        one_row = bool(spec.shape) and (spec.shape[0] == 1 or isinstance(spec.shape[0], str))
        if others or len(spec.shape) != 4 or mode is None or not one_row:
            shapes = {each.name: list(each.shape) for each in signature.inputs}
            raise StageFailed(
                f"image: the inputs are {shapes}, expected one with the axes batch, "
                f"{', '.join(self.layout)}, of 1 or 3 channels (c) and any number of rows, or one"
            )
        size = self.size or (axes["h"], axes["w"])
        for axis, side in zip("hw", size, strict=True):
            expected = axes[axis]
            if isinstance(side, str):
                sizes = ("batch", *({"h": 224, "w": 224}.get(name, axes[name]) for name in axes))
                raise StageFailed(
                    "image: the model takes images of any size, and they are all to become one "
                    "size: give it as `size`, such as [224, 224], or on the command line as "
                    f"--input {spec.name}={','.join(map(str, sizes))}"
                )
            if isinstance(expected, int) and expected != side:
                raise StageFailed(f"image: size is {list(size)}, expected the sizes of {axes}")
        if self.shorter_side is not None and self.squashed_to is not None:
            raise StageFailed("image: give one of shorter_side and squashed_to")
        if self.shorter_side is not None and self.shorter_side < max(map(int, size)):
            raise StageFailed(f"image: shorter_side {self.shorter_side} is less than {list(size)}")
        if self.squashed_to and any(
            a < int(b) for a, b in zip(self.squashed_to, size, strict=True)
        ):
            raise StageFailed(f"image: squashed_to {self.squashed_to} is less than {list(size)}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, axes["c"]):
                raise StageFailed(f"image: {name} has {len(values)} numbers, expected {axes['c']}")
        return {**self.model_dump(mode="json"), "size": list(size), "mode": mode}


class AudioInput(Settings):
    """The model's input is a sound: WAV and FLAC bodies are taken."""

    rate: Count = 16_000
    """Samples a second that the model was trained with; other sounds are converted."""
    seconds: Positive | None = None
    """Longer sounds are cut off, and shorter ones filled up with zeros; by default as many as the
    model's input takes."""
    normalize: bool = False
    """Whether each sound's mean is taken from it, and it is divided by its standard deviation."""
    extractor: dict[str, JsonValue] = {}
    """A `preprocessor_config.json` of transformers' ASTFeatureExtractor or WhisperFeatureExtractor,
    which then compute the model's input; by default it is the waveform."""

    kind: ClassVar[str] = "audio"
    requirements: ClassVar[tuple[Requirement, ...]] = tuple(
        Requirement(what=name, install=pip_install("audio")) for name in ("soundfile", "soxr")
    )

    def default_input(self) -> TensorSpec:
        """Return the input of a model that declares none."""
        length = round(self.seconds * self.rate) if self.seconds else "samples"
        return TensorSpec(name="input", shape=("batch", length), dtype="float32")

    def handler_settings(self, signature: Signature) -> dict[str, Any]:
        """Return the handler's settings; StageFailed if the model does not take one sound a row."""
        spec, *others = signature.inputs
        shape, length = spec.shape, self.seconds and round(self.seconds * self.rate)
        is_wave = len(shape) == 2 or (len(shape) == 3 and shape[1] == 1)
        if others or "float" not in spec.dtype or not (self.extractor or is_wave):
            shapes = {each.name: list(each.shape) for each in signature.inputs}
            raise StageFailed(f"audio: the inputs are {shapes}, expected one of [batch, samples]")
        if self.extractor and self.extractor.get("feature_extractor_type") not in EXTRACTORS:
            raise StageFailed(f"audio: extractor is none of {', '.join(EXTRACTORS)}")
        if not self.extractor and isinstance(shape[-1], int):
            if length not in (None, shape[-1]):
                raise StageFailed(f"audio: {length} samples, and the model takes {shape[-1]}")
            length = shape[-1]
        return {**self.model_dump(mode="json"), "samples": length}


class TextInput(Settings):
    """The model's input is a text: `text/plain` bodies, and lists of texts, are taken."""

    tokenizer: str
    """Hugging Face `tokenizer.json`, relative to the pipeline file."""
    max_length: Count | None = None
    """Tokens after which a text is cut off; by default the size of the input's axis, or what the
    tokenizer's file says."""
    pad_token: str | None = None
    """Fills shorter texts up; by default what the file says, or `[PAD]`, or `<pad>`."""
    fields: dict[str, Field] = {}
    """What of an encoding each input is, where inputs have other names than `input_ids`,
    `attention_mask` and `token_type_ids`."""

    kind: ClassVar[str] = "text"
    requirements: ClassVar[tuple[Requirement, ...]] = (
        Requirement(what="tokenizers", install=pip_install("text")),
    )

    def resolve_paths(self, folder: Path) -> Self:
        """Resolve the tokenizer's path; ArtifactInvalid where there is no such file."""
        file = (folder / self.tokenizer).absolute()
        if not file.is_file():
            raise ArtifactInvalid(f"tokenizer: {file}: no such file")
        return self.model_copy(update={"tokenizer": str(file)})

    def identity(self) -> dict[str, Any]:
        """Return the cache key's part: the settings, and the hash of the tokenizer's file."""
        return {**self.model_dump(mode="json"), "tokenizer": sha256_of(Path(self.tokenizer))}

    def handler_settings(self, signature: Signature) -> dict[str, Any]:
        """Return the handler's settings; StageFailed for another tokenizer than the inputs need."""
        with raised_as(StageFailed, f"text: {self.tokenizer}: not a tokenizer"):
            now = Path(self.tokenizer).stat()
            version = (now.st_ino, now.st_size, now.st_mtime_ns)
            longest, pad, pad_id = _tokenizer_settings(self.tokenizer, version, self.pad_token)
        fields = FIELDS | self.fields
        for spec in signature.inputs:
            if spec.name not in fields or len(spec.shape) != 2 or "float" in spec.dtype:
                raise StageFailed(
                    f"text: input {spec.name} is {spec.dtype} {list(spec.shape)}, expected "
                    f"integers of [batch, length] and one of {sorted(fields)}; name it in `fields`"
                )
        axis = signature.inputs[0].shape[1]
        length = axis if isinstance(axis, int) else None
        most = length or signature.bounds(str(axis)).max
        limits = (self.max_length, most, longest)
        if pad is None or (self.pad_token and pad != self.pad_token):
            raise StageFailed(
                f"text: {self.tokenizer} has no {self.pad_token or 'padding'} token; "
                "name one with `pad_token`"
            )
        return {
            "tokenizer": TOKENIZER,
            "max_length": min((n for n in limits if n), default=None),
            "length": length,
            "fields": {spec.name: fields[spec.name] for spec in signature.inputs},
            "pad_token": pad,
            "pad_id": pad_id,
        }


# A packaging run asks five times, and a large vocabulary takes seconds to parse. Its settings are
# kept, not the tokenizer, which has hundreds of MiB.
@lru_cache(maxsize=4)
def _tokenizer_settings(
    file: str, version: tuple[int, ...], pad_token: str | None
) -> tuple[int | None, str | None, int | None]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(Path(file).read_text(encoding="utf-8"))
    candidates = (pad_token, (tokenizer.padding or {}).get("pad_token"), "[PAD]", "<pad>")
    pad = next((t for t in candidates if t and tokenizer.token_to_id(t) is not None), None)
    longest = (tokenizer.truncation or {}).get("max_length")
    return longest, pad, tokenizer.token_to_id(pad) if pad else None


FORMS = {form.kind: form for form in (ImageInput, TextInput, AudioInput)}


Forms: TypeAlias = Mapping[str, ImageInput | TextInput | AudioInput]
"""What a client may send beside tensors, by kind."""


def form_settings(forms: Forms, signature: Signature) -> dict[str, Any]:
    """Return the handler's settings of each form, for a model of this signature."""
    return {name: form.handler_settings(signature) for name, form in forms.items()}


def forms_of(artifact: Artifact) -> Forms:
    """Return what an artifact's carried files say; what does not fit its inputs is left out."""
    found: dict[str, ImageInput | TextInput | AudioInput] = {}
    form: ImageInput | AudioInput | TextInput
    for file in (IMAGES, TOKENIZER):
        if file not in artifact.manifest.files:
            continue
        artifact.check_files(hashed=[file])
        try:
            if file == TOKENIZER:
                form = TextInput(tokenizer=str(artifact.path / file))
            else:
                form = processor_input(artifact.carried_json(file))
            if missing := [each for each in form.requirements if each.missing()]:
                raise StageFailed(f"{missing[0].what} is not installed ({missing[0].install})")
            form.handler_settings(artifact.signature)
            found[form.kind] = form
        except StageFailed as error:
            logger.warning("%s: %s is not used: %s", artifact.path, file, error)
    return found


def processor_input(config: Mapping[str, Any]) -> ImageInput | AudioInput:
    """Return what a `preprocessor_config.json` says of images or sounds; StageFailed as below."""
    if "sampling_rate" not in config:
        return image_input(config)
    kind = str(config.get("feature_extractor_type"))
    known: dict[str, Any] = {"rate": config["sampling_rate"], "seconds": config.get("seconds")}
    if kind in EXTRACTORS:
        return AudioInput(**known, extractor=dict(config))
    if kind != "Wav2Vec2FeatureExtractor":
        raise StageFailed(f"audio: {kind} is not computed here")
    return AudioInput(**known, normalize=config.get("do_normalize", True))


def image_input(config: Mapping[str, Any]) -> ImageInput:
    """Return the settings of a `preprocessor_config.json`; StageFailed for an unknown step."""
    kind = str(config.get("image_processor_type", ""))
    others = {name for name in config if name.startswith("do_")} - {*STEPS, *WITHOUT_EFFECT}
    unknown = sorted(name for name in others if config[name])
    unknown += [name for name in ("rescale_offset", "include_top") if config.get(name)]
    if unknown:
        raise StageFailed(f"image: {kind} does {', '.join(unknown)}, which is not computed here")
    settings: dict[str, Any] = {"crop_rounding": "down", **_sizes(config, kind)}
    if config.get("data_format") == "channels_last":
        settings["layout"] = "hwc"
    if "crop_rounding" in config:  # of a file that this toolkit wrote
        settings["crop_rounding"] = config["crop_rounding"]
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
        # Its processor squashes from 384 on, and crops below.
        shorter = int(edge / (config["crop_pct"] or 224 / 256)) if edge < 384 else None
        return {"size": (edge, edge), "shorter_side": shorter}
    if config.get("crop_pct") or not crop:
        raise StageFailed(f"image: {kind} resizes to {dict(size)} without cropping to `crop_size`")
    return sizes | {"shorter_side": edge}


def class_settings(
    artifact: Artifact, names: tuple[str, ...], top: int, scores: npt.NDArray[Any]
) -> dict[str, Any] | None:
    """Return the handler's settings of class names; None unless the scores are [rows, names]."""
    if not names or scores.ndim != 2 or scores.shape[1] != len(names):
        return None
    config = artifact.carried_json(CONFIG) or {}
    probable = are_probabilities(scores)
    # Classes that do not exclude each other.
    several = not probable and config.get("problem_type") == "multi_label_classification"
    settings: dict[str, Any] = {"names": [*names], "top": min(top, len(names))}
    settings["softmax"] = not probable and not several
    return settings | ({"sigmoid": True} if several else {})


def are_probabilities(scores: npt.NDArray[Any]) -> bool:
    """Return whether the rows of an output are probabilities rather than logits."""
    rows = scores.astype("float64")
    return bool((rows >= 0).all() and (abs(rows.sum(axis=-1) - 1) <= 1e-3).all())
