"""The data of a pipeline: a factory of the user's code, or images, tables and arrays."""

from __future__ import annotations

from math import fsum
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from compress.common.config import Count, Ratio, Settings
from compress.common.factories import Reference
from compress.common.requirements import Requirement, pip_install
from compress.data.loader_config import Loading
from compress.pipelines.config.model_spec import class_by_key, refuse_repeated
from compress.serve.packaging.request_forms import AudioInput, ImageInput, TextInput

PARQUET = (".parquet", ".pq")
DATASETS = Requirement(what="datasets", install=pip_install("datasets"))
PILLOW = Requirement(what="PIL", install="pip install pillow")
Columns = Annotated[tuple[str, ...], Field(min_length=1)]


class DataSettings(Settings):
    """How samples are read, wherever they come from."""

    batch_size: Count = 128
    """Samples per batch in evaluation and calibration."""
    loader: Loading = Loading()
    """How samples are read and put together into batches."""

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """What must be installed."""
        return ()


class FactoryData(DataSettings):
    """Data of your own code."""

    factory: Reference
    """`module:callable` that returns {"train": Dataset, "val": Dataset, ...}."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the factory."""


class FileData(DataSettings):
    """Data that are read from files without code."""

    key: ClassVar[str]
    """The setting that names the files."""
    file_form: ClassVar[type[ImageInput | AudioInput] | None] = None
    """What a file of one sample is."""

    split: dict[Literal["val", "test", "calibration", "unlabelled"], Ratio] = {}
    """Shares of the samples that are no training data, such as `{val: 0.2, test: 0.1}`, for files
    that are not divided into splits: the same ones each time, and as many of each class."""
    classes: tuple[str, ...] | str = ()
    """Labels in the order of the model's classes, or a text file with one a line, relative to this
    file; by default the names that the model has, else the labels sorted. Whole numbers from 0 on
    are classes already."""
    prepare: ImageInput | TextInput | AudioInput | None = None

    @model_validator(mode="after")
    def _leaves_training_data(self) -> Self:
        if fsum(self.split.values()) >= 1:
            raise ValueError("split: the shares add up to 1 or more, which leaves nothing to train")
        if not isinstance(self.classes, str):
            refuse_repeated("classes: label", self.classes)
        return self

    @property
    def place(self) -> str:
        """File or folder, relative to the pipeline file."""
        return str(getattr(self, self.key))

    @property
    def form(self) -> type[ImageInput | TextInput | AudioInput] | None:
        """What a sample is before it is prepared; None where numbers are inputs as they are."""
        if getattr(self, "text", None):
            return TextInput
        is_image = getattr(self, "image", None) or isinstance(self.prepare, ImageInput)
        return ImageInput if is_image else self.file_form

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """What must be installed."""
        needs = () if self.form is None else self.form.requirements
        needs = (PILLOW,) if self.form is ImageInput else needs
        is_parquet = self.key == "table" and Path(self.place).suffix.lower() in PARQUET
        return (DATASETS, *needs) if is_parquet or self.key == "huggingface" else needs


class ImageData(FileData):
    """Image files in folders: `cat/1.jpg` is a sample of class `cat`.

    Folders named `train`, `val`, `test`, `calibration` and `unlabelled` hold those splits. Images
    that lie in no folder of a class have no labels.
    """

    key: ClassVar[str] = "images"
    file_form = ImageInput

    images: str
    """Folder, relative to this file."""
    prepare: ImageInput | None = None
    """How an image becomes the model's input, in training, judging and serving alike, such as
    `{size: 224, shorter_side: 256, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}`. By
    default as a Hugging Face folder's `preprocessor_config.json` or timm's configuration says."""


class AudioData(FileData):
    """WAV and FLAC files in folders, as `images` are.

    A sound of several channels is their mean.
    """

    key: ClassVar[str] = "audio"
    file_form = AudioInput

    audio: str
    """Folder, relative to this file."""
    prepare: AudioInput | None = None
    """How a sound becomes the model's input, in training, judging and serving alike, such as
    `{rate: 16000, seconds: 1}`. What is left out follows a Hugging Face folder's
    `preprocessor_config.json`."""


def _refuse_repeated_columns(
    column: str | None, columns: tuple[str, ...] | None, label: str | tuple[str, ...] | None
) -> None:
    labels = (label,) if isinstance(label, str) else label or ()
    refuse_repeated("column", [*((column,) if column else columns or ()), *labels])


class TableData(FileData):
    """Rows of a CSV, TSV, JSON-lines or Parquet file.

    A folder with `train.csv`, `val.csv` and so on holds those splits.
    """

    key: ClassVar[str] = "table"

    table: str
    """File or folder, relative to this file."""
    text: str | None = None
    """Column of texts, which the model's tokenizer turns into its inputs."""
    columns: Columns | None = None
    """Columns of numbers, which are the model's input in this order; without `text`, by default
    all but the label."""
    label: str | Columns | None = None
    """Column of the labels: texts are classes, whole numbers too, others are predicted as numbers;
    several columns of numbers are a vector."""
    prepare: TextInput | None = None
    """How a text becomes the model's inputs; by default as a Hugging Face folder's tokenizer."""

    @model_validator(mode="after")
    def _has_one_kind_of_input(self) -> Self:
        if self.text is not None and self.columns is not None:
            raise ValueError("give one of text and columns: what of a row is the model's input")
        if self.prepare and self.text is None:
            raise ValueError("prepare: only texts are prepared; name their column as `text`")
        _refuse_repeated_columns(self.text, self.columns, self.label)
        return self


class ArrayData(FileData):
    """Arrays of an .npz or .npy file, one row a sample.

    Names such as `x_train` and `test_labels` tell the split; of a folder, the files' names do.
    Several arrays are the model's inputs by their names, in the order of `model.inputs`, or else of
    the file.
    """

    key: ClassVar[str] = "arrays"

    arrays: str
    """File or folder, relative to this file."""
    label: str | None = None
    """Array of the labels; by default that named y, label, labels, target or targets."""
    prepare: ImageInput | None = None
    """How arrays of pixels, uint8 of [rows, height, width] or with channels, become the model's
    input; without it, arrays are inputs as they are, and float64 is taken as float32."""


class HuggingFaceData(FileData):
    """A folder of Hugging Face's `datasets`, as `save_to_disk` writes it or the hub holds it."""

    key: ClassVar[str] = "huggingface"

    huggingface: str
    """Folder, relative to this file; nothing is downloaded, and no script in it is run."""
    image: str | None = None
    """Column of images."""
    text: str | None = None
    """Column of texts."""
    columns: Columns | None = None
    """Columns of numbers, or of arrays, which are the model's inputs: several by their names, in
    the order of `model.inputs`, or else in this one."""
    label: str | None = None
    """Column of the labels; by default `label` or `labels`, where there is one."""
    prepare: ImageInput | TextInput | None = None
    """How an image or a text becomes the model's inputs; by default as the model's own files say.
    """

    @model_validator(mode="after")
    def _has_inputs(self) -> Self:
        if sum(each is not None for each in (self.image, self.text, self.columns)) != 1:
            raise ValueError("give one of image, text and columns: what is the model's input")
        fits = not self.columns and self.form and isinstance(self.prepare, self.form)
        if self.prepare is not None and not fits:
            raise ValueError("prepare: settings of images are for `image`, of texts for `text`")
        _refuse_repeated_columns(self.image or self.text, self.columns, self.label)
        return self


DATA_CLASSES: dict[str, type[DataSettings]] = {
    "factory": FactoryData,
    "images": ImageData,
    "audio": AudioData,
    "table": TableData,
    "arrays": ArrayData,
    "huggingface": HuggingFaceData,
}


FILE_KEYS = tuple(key for key in DATA_CLASSES if key != "factory")
DataSpec = Annotated[
    Annotated[FactoryData, Tag("FactoryData")]
    | Annotated[ImageData, Tag("ImageData")]
    | Annotated[AudioData, Tag("AudioData")]
    | Annotated[TableData, Tag("TableData")]
    | Annotated[ArrayData, Tag("ArrayData")]
    | Annotated[HuggingFaceData, Tag("HuggingFaceData")],
    Discriminator(class_by_key(DATA_CLASSES, "factory")),
]
"""The `data:` section; the class follows from which of its keys `factory`, … is there."""
