"""The `auto:` section of a pipeline file: limits, time, and what is searched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from compress.common.config import Count, Positive, Settings
from compress.core.stage import CalibrationSamples
from compress.pipelines.config.registry import AnyStage
from compress.pruning.channel_settings import ChannelSelection, Criterion
from compress.pruning.pruning_stage import AnyFinetune

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


def _read(value: Any, units: dict[str, float], example: str) -> float:
    """Return a number that is written with a unit; raise ValueError where it has none of these."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([A-Za-zµ]+)\s*", str(value))
    if found is None or found[2] not in units:
        raise ValueError(f"expected a number with its unit ({', '.join(units)}), as {example}")
    return float(found[1]) * units[found[2]]


def _in_units(units: dict[str, float], example: str) -> BeforeValidator:
    return BeforeValidator(partial(_read, units=units, example=example), json_schema_input_type=str)


def _with_unit(unit: str) -> PlainSerializer:
    return PlainSerializer(lambda value: f"{value!r}{unit}", return_type=str)


Seconds = Annotated[float, _in_units(SECONDS, "10m"), _with_unit("s"), Field(gt=0)]
Bytes = Annotated[float, _in_units(BYTES, "1MB"), _with_unit("B"), Field(gt=0)]


class LatencyLimit(Settings):
    """How long a call may take on `threads` threads."""

    p50_ms: Positive | None = None
    """Longest median time, in milliseconds; `latency: 2ms` is short for it."""
    p95_ms: Positive | None = None
    """Largest 95th percentile, in milliseconds, as of the gate `max_latency`."""

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.p50_ms is None and self.p95_ms is None:
            raise ValueError("expected p50_ms or p95_ms, or a median with its unit, as 2ms")
        return self

    @property
    def described(self) -> str:
        """The limits in words."""
        words = [] if self.p50_ms is None else [f"{self.p50_ms:g} ms a call"]
        words += [] if self.p95_ms is None else [f"{self.p95_ms:g} ms in 95 of 100 calls"]
        return ", ".join(words)


def _latency(value: Any) -> Any:
    is_whole = value is None or isinstance(value, dict | LatencyLimit)
    return value if is_whole else {"p50_ms": _read(value, MILLISECONDS, "2ms")}


class AutoLimits(Settings):
    """What a model must keep to."""

    max_drop: Annotated[float, Field(ge=0)] | None = None
    """Most points (hundredths) of the metric that may be lost, on samples that did not decide."""
    latency: Annotated[
        LatencyLimit | None,
        BeforeValidator(_latency, json_schema_input_type=str | LatencyLimit | None),
    ] = None
    """Longest time of a call on `threads` threads: the median with its unit, or `{p95_ms: 2}`."""
    size: Bytes | None = None
    """Largest file, with its unit: `1MB`."""
    memory: Bytes | None = None
    """Most memory that opening the file and calling it may take, beyond that of the libraries, with
    its unit: `64MiB`; measured as the gate `max_memory` does."""

    @property
    def described(self) -> str:
        """The limits in words; empty where there are none."""
        words = [] if self.max_drop is None else [f"a drop of {self.max_drop:g} points"]
        words += [] if self.latency is None else [self.latency.described]
        words += [] if self.size is None else [f"{self.size / 1e6:g} MB"]
        words += [] if self.memory is None else [f"{self.memory / 2**20:g} MiB of memory"]
        return ", ".join(words)


class WidthSettings(Settings):
    """Which widths are tried."""

    values: Annotated[int, Field(ge=2, le=16)] = 4
    """Most widths that are tried of each group of coupled channels."""
    round_to: Count = 16
    """As in `prune_channels`, like the settings below."""
    importance: Criterion = "obs"
    """How channels are ranked."""
    calibration_samples: CalibrationSamples = None
    """Samples on which channels are ranked and layers refitted in each model; fewer are faster."""
    include: tuple[str, ...] = ()
    """Names of modules; if given, only channels that they produce are removed."""
    exclude: tuple[str, ...] = ()
    """Names of modules whose channels all stay."""
    across_norms: bool = False
    """Whether channels are removed over which normalisations take statistics."""

    @property
    def selection(self) -> ChannelSelection:
        """Which channels may be removed, as `prune_channels` has it."""
        return ChannelSelection.model_validate(self, from_attributes=True)


class AutoSpace(Settings):
    """What the search may change."""

    widths: WidthSettings | None = WidthSettings()
    """How many channels of each group stay; null leaves all of them."""
    formats: Annotated[tuple[Format, ...], Field(min_length=1)] = ("float", "int8_static")
    """Numbers that the model computes with, one of these for all its layers but those that
    `float_layers` allows. `w7a8` is 7-bit weights with 8-bit activations, which loses a little more
    than `int8` and is faster on x86 processors without VNNI, whose products of 8-bit numbers are
    not exact in the fast kernels."""
    float_layers: Annotated[int, Field(ge=0)] = 8
    """Most layers of a quantized format of which the search decides one by one whether they stay in
    float: those that are faster in float, and those that lose most. 0 quantizes all layers."""
    blocks: bool = False
    """Whether whole blocks, such as transformer layers or residual blocks, may be removed as by
    `prune_layers` with `refit`: none, 1, 2, 4, and so on, those that lose least first. Widths are
    searched for each of these numbers, which takes time."""
    runtimes: Annotated[tuple[Runtime, ...], Field(min_length=1)] = ("onnx",)
    """What runs the file: ONNX Runtime (`onnx`), OpenVINO (`openvino`); each format in each."""
    recovery: AnyFinetune | None = None
    """How the most promising of the smaller models are trained, by successive halving: some for one
    epoch, the better half of them on, the best for all `epochs`. By default layers are refitted,
    and nothing is trained."""


class AutoSettings(Settings):
    """Limits, and what may be changed to meet them."""

    limits: AutoLimits = AutoLimits()
    """What a model must keep to."""
    batch: Count | None = None
    """Samples of a call that is timed; by default one, or as many as the model takes."""
    time: Annotated[Seconds, Field(json_schema_extra={"default": "10m"})] = 600.0
    """How long to search, with its unit: `10m`. What has begun then, as a model that is made, is
    finished, and the best model's pipeline is run; the results say where the time went."""
    points: Count = 8
    """Most points of the front for which a pipeline is written: the best, others within the limits,
    then the rest. The pipelines of those within the limits are run."""
    space: AutoSpace = AutoSpace()
    """What the search may change."""
    after: tuple[AnyStage, ...] = ()
    """Stages of each point after its export, such as `package_triton`; they are not searched."""

    def without_blocks(self, removed: Sequence[str]) -> Self:
        """Return settings whose names of modules are those after blocks were removed from lists."""
        widths = self.space.widths
        if widths is None or not removed:
            return self
        include, exclude = (
            tuple(name for p in patterns if (name := name_without_blocks(p, removed)) is not None)
            for patterns in (widths.include, widths.exclude)
        )
        # Without a pattern all groups would be included, and here none is left.
        is_empty = widths.include and not include
        changed = widths.model_copy(update={"include": include, "exclude": exclude})
        space = self.space.model_copy(update={"widths": None if is_empty else changed})
        return self.model_copy(update={"space": space})


def name_without_blocks(pattern: str, removed: Sequence[str]) -> str | None:
    """Return the name that a module has once blocks are removed; None for what is inside them."""
    if any(f"{pattern}.".startswith(f"{block}.") for block in removed):
        return None
    blocks = [block.rpartition(".") for block in removed]
    for container in sorted({container for container, _, _ in blocks}, key=len, reverse=True):
        prefix = f"{container}." if container else ""
        index, dot, rest = pattern.removeprefix(prefix).partition(".")
        if pattern.startswith(prefix) and index.isdigit():
            gone = [int(i) for around, _, i in blocks if around == container and i.isdigit()]
            place = int(index) - sum(i < int(index) for i in gone)
            pattern = f"{prefix}{place}{dot}{rest}"
    return pattern
