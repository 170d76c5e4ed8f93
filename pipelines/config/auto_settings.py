"""The `auto:` section of a pipeline file: limits, time, and what is searched."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainSerializer

from compress.common.config import Count, Settings
from compress.pruning.finetune import AnyFinetune
from compress.pruning.importance.criteria import Criterion

Format: TypeAlias = Literal[
    "float",
    "int8_static",
    "int8_dynamic",
    "w7a8_static",
    "w7a8_dynamic",
    "weights_8",
    "weights_4",
]
Runtime: TypeAlias = Literal["onnx", "openvino"]

MILLISECONDS = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _in_units(units: dict[str, float], example: str) -> BeforeValidator:
    def read(value: Any) -> Any:
        found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-zµ]+)\s*", str(value))
        if found is None or found[2] not in units:
            raise ValueError(f"expected a number with its unit ({', '.join(units)}), as {example}")
        return float(found[1]) * units[found[2]]

    return BeforeValidator(read, json_schema_input_type=str)


def _with_unit(unit: str) -> PlainSerializer:
    """Write a number with its unit, as it is read."""
    return PlainSerializer(lambda value: f"{value!r}{unit}", return_type=str, when_used="json")


Milliseconds = Annotated[float, _in_units(MILLISECONDS, "2ms"), _with_unit("ms"), Field(gt=0)]
Seconds = Annotated[float, _in_units(SECONDS, "10m"), _with_unit("s"), Field(gt=0)]
Bytes = Annotated[float, _in_units(BYTES, "1MB"), _with_unit("B"), Field(gt=0)]


class AutoLimits(Settings):
    """What a model must keep to."""

    max_drop: Annotated[float, Field(ge=0)] | None = None
    """Most points (hundredths) of the metric that may be lost, on samples that the search did not
    decide by."""
    latency: Milliseconds | None = None
    """Longest median time of a call on `threads` threads, with its unit: `2ms`."""
    size: Bytes | None = None
    """Largest file, with its unit: `1MB`."""


class WidthSettings(Settings):
    """Which widths are tried."""

    values: Annotated[int, Field(ge=2, le=16)] = 4
    """Widths of each group of coupled channels, at most."""
    round_to: Count = 16
    """As in `prune_channels`, as are the others."""
    importance: Criterion = "obs"
    """How channels are ranked."""
    calibration_samples: Count | None = None
    """Samples on which channels are ranked and layers are refitted, in each model; fewer take less
    time."""
    include: tuple[str, ...] = ()
    """Names of modules; if given, only channels that they produce are removed."""
    exclude: tuple[str, ...] = ()
    """Names of modules whose channels all stay."""
    across_norms: bool = False
    """Whether channels are removed over which normalisations take statistics."""


class AutoSpace(Settings):
    """What is decided."""

    widths: WidthSettings | None = WidthSettings()
    """How many channels of each group stay; null leaves all of them."""
    formats: Annotated[tuple[Format, ...], Field(min_length=1)] = ("float", "int8_static")
    """Numbers that the model computes with, one of these for all its layers but those that
    `float_layers` allows. `w7a8` is 7-bit weights with 8-bit activations, which loses a little more
    than `int8` and is faster on x86 processors without VNNI, whose products of 8-bit numbers are
    not exact in the fast kernels."""
    float_layers: Annotated[int, Field(ge=0)] = 8
    """Layers of a quantized format about which is decided one by one whether they stay in float, at
    most: those that are faster so, and those that lose most. With 0 no format is mixed."""
    blocks: bool = False
    """Whether whole blocks, such as transformer layers or residual blocks, may be removed as by
    `prune_layers` with `refit`: none, 1, 2, 4, and so on, those first that lose least. Widths are
    decided anew for each of these numbers, which takes time for each."""
    runtimes: Annotated[tuple[Runtime, ...], Field(min_length=1)] = ("onnx",)
    """What runs the file: ONNX Runtime (`onnx`), OpenVINO, or either; each format is tried in each
    of these."""
    recovery: AnyFinetune | None = None
    """How the most promising of the smaller models are trained, by successive halving: some for one
    epoch, the better half of them on, the best for all `epochs`. By default layers are refitted,
    and nothing is trained."""


class AutoSettings(Settings):
    """Limits, and what may be changed to meet them."""

    limits: AutoLimits = AutoLimits()
    """What a model must keep to."""
    batch: Count | None = None
    """Samples of a call whose latency is measured; by default one, or as many as the model
    takes."""
    time: Annotated[Seconds, Field(json_schema_extra={"default": "10m"})] = 600.0
    """For how long the search goes on, with its unit: `10m`. What is measured then is finished."""
    space: AutoSpace = AutoSpace()
    """What is decided."""
