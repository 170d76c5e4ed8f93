"""How latency and size follow from widths and layers in float, for each format of numbers."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from compress.common.sealed_json import read_state, write_state
from compress.export.latency.resizing import (
    FLOAT,
    MOST_EXPORTS,
    MixedModel,
    ResizableModel,
    weighted_layers,
)
from compress.export.latency.served_latency import (
    LatencyModel,
    WidthCosts,
    graph_to_serve,
    measure_grid,
    open_as_served,
    spread_widths,
    write_alone,
)
from compress.export.onnx.proto_io import read
from compress.pipelines.auto.candidates import QUANTIZING, Candidate
from compress.pipelines.config.registry import stages
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.latency.widths import WidthVariants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import onnx_ir as ir

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.core.progress import Progress
    from compress.export.latency.kernels import KernelTable
    from compress.pipelines.config.auto_settings import AutoSettings, Format, Runtime
    from compress.profiling.benchmark import Opener
    from compress.profiling.interaction_sum import Choice, Value

    Grid = Mapping[str, Sequence[Value]]

FITTED_MODELS = 16
"""Models at widths of the grid whose latencies the kernels' sum is fitted to."""
CALIBRATION_SAMPLES, COMPARED_SAMPLES, SMOOTHING = 32, 16, 0.5
"""Samples with which exports are quantized and compared with the float model, and the strength of
SmoothQuant: their speed is looked at, not their answers."""
QUANTIZED = "quantized"
"""Value of the decision about a layer that is not put back to float."""
SMALL_LOSS_SHARE = 0.02
"""Share of a format's loss that a layer must have, or be faster in float, to be decided."""
MUCH_FASTER_SHARE = 0.02
"""Share of the time of all kernels by which a layer must be faster in float."""


@dataclass(frozen=True)
class RuntimeFit:
    """How latency and file size in a runtime follow from kernels and weights."""

    latency: LatencyModel
    bytes_ratio: float
    """Bytes of the file for each byte of the ONNX file."""
    bytes_added: float
    """Bytes of each file."""


@dataclass
class FormatModel:
    """Latency and size in one format and runtime, by widths and the layers left in float."""

    format: Format
    latency_ms: InteractionSum
    bytes: InteractionSum
    runtime: Runtime = "onnx"
    removed_blocks: tuple[str, ...] = ()
    """Blocks that the model lacks at all widths."""
    loss_increase: float = 0.0
    """Squared distance of the whole model in this format from the float one."""
    layers: DecidedLayers = field(default_factory=lambda: DecidedLayers((), {}, ()))
    """Those that may be left in float."""
    whole: Choice = field(default_factory=dict)
    """The model's own widths, and no layer in float."""
    smallest: Choice = field(default_factory=dict)
    """The smallest widths, and no layer in float."""
    fit: RuntimeFit | None = None
    """What the figures follow by; None for tables."""
    _ratios: list[float] = field(default_factory=list)
    """Measured over predicted latency of checked models."""

    def choice_of(self, candidate: Candidate) -> dict[str, Value] | None:
        """Return a candidate's values of all decisions; None where it has others."""
        if candidate.removed_blocks != self.removed_blocks:
            return None
        layers = (decision_of(name) for name in candidate.float_layers)
        chosen: dict[str, Value] = {**dict(candidate.widths), **dict.fromkeys(layers, FLOAT)}
        return {**self.whole, **chosen} if chosen.keys() <= self.whole.keys() else None

    def candidate(self, choice: Choice) -> Candidate:
        """Return the candidate of some values of all decisions."""
        changed = {name: value for name, value in choice.items() if value != self.whole[name]}
        widths = ((name, int(value)) for name, value in changed.items() if value != FLOAT)
        layers = (name for name in self.layers.names if decision_of(name) in changed)
        return Candidate(
            self.format,
            tuple(sorted(widths)),
            tuple(sorted(layers)),
            runtime=self.runtime,
            removed_blocks=self.removed_blocks,
        )

    @property
    def correction(self) -> float:
        """Factor from predicted to measured latency."""
        return median(self._ratios) if self._ratios else 1.0

    def correct(self, predicted_ms: float, measured_ms: float) -> None:
        """Take a measured latency into account; `predicted_ms` is without correction."""
        self._ratios.append(measured_ms / predicted_ms)

    def corrected(self) -> InteractionSum:
        """Return the latency in milliseconds, corrected by all models measured so far."""
        return InteractionSum.combine([(self.correction, self.latency_ms)], 0.0)


@dataclass(frozen=True)
class DeeperModels:
    """Models of a network with more blocks, from which those with fewer of them follow.

    What two groups that meet in a layer change together is the same in both, as the layer is. What
    a group changes alone is not: the residual stream has fewer readers.
    """

    models: Mapping[Runtime, FormatModel]
    names: Mapping[str, str]
    """Group of the network with fewer blocks → its name where there are more."""

    def fits(self) -> dict[Runtime, RuntimeFit]:
        """Return how latency and size follow in each runtime."""
        return {r: model.fit for r, model in self.models.items() if model.fit is not None}

    def has_pair(self, pair: tuple[str, ...], grid: Grid) -> bool:
        """Whether it is known what two groups change together, at the widths of a grid."""
        return all(
            self._terms(model.latency_ms, pair, grid) is not None for model in self.models.values()
        )

    def with_pairs(
        self, quantity: InteractionSum, deeper: InteractionSum, grid: Grid
    ) -> InteractionSum:
        """Return a quantity of single groups, and what pairs change in the deeper network."""
        terms = dict(quantity.terms)
        for pair in combinations(sorted(grid), 2):
            known = self._terms(deeper, pair, grid)
            if known is not None:
                terms[pair] = known
        return InteractionSum(quantity.base, terms)

    def _terms(
        self, deeper: InteractionSum, pair: tuple[str, ...], grid: Grid
    ) -> dict[tuple[Value, ...], float] | None:
        """Return what two groups change together, by their widths; None where that is unknown."""
        a, b = (self.names.get(group, "") for group in pair)
        own = deeper.terms.get((a, b))
        if own is None and (b, a) in deeper.terms:
            own = {(first, second): c for (second, first), c in deeper.terms[b, a].items()}
        asked = {*product(*(grid[group][1:] for group in pair))}
        return dict(own) if own is not None and {*own} == asked else None


@dataclass(frozen=True)
class WholeModels:
    """Latencies and sizes of whole models that predictions are fitted to, in a file if given."""

    file: Path | None = None
    key: str = ""
    """What they depend on, besides format, runtime, widths and layers in float."""
    known: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Format, runtime and choice → latency in milliseconds, and bytes."""

    @classmethod
    def read(cls, file: Path, key: str) -> Self:
        """Read what an earlier search measured; nothing where that is not there, or of another."""
        return cls(file, key, read_state(file, key, dict[str, tuple[float, int]]) or {})

    def add(self, model: str, milliseconds: float, size: int) -> None:
        """Add a measured model, and write the file, if any."""
        self.known[model] = milliseconds, size
        if self.file is not None:
            write_state(self.file, self.key, self.known)


def build_format_models(
    format: Format,
    runtimes: Sequence[Runtime],
    grid: Grid,
    model: EagerModel,
    context: Context,
    settings: AutoSettings,
    table: KernelTable,
    measure_ms: Callable[[Opener], float],
    layers: LayerSensitivity | None = None,
    deadline: float = math.inf,
    deeper: DeeperModels | None = None,
    whole_models: WholeModels | None = None,
) -> list[FormatModel]:
    """Measure kernels over a grid of widths, and fit their sum to whole models in each runtime.

    The kernels are ONNX Runtime's. What another runtime takes follows from the same figures by
    other coefficients: both compute the same products and read the same weights.

    Args:
        format: numbers that the model computes with.
        runtimes: what runs it, each with a model of its own.
        grid: group → its widths, the model's own first.
        model: the model.
        context: data, threads and seed.
        settings: which groups may lose channels.
        table: measured kernels, to which further ones are added.
        measure_ms: measures the latency of a file as those of candidates are measured.
        layers: those that may be left in float, of which some that are worth it are.
        deadline: on the clock of :func:`time.monotonic`, for what is measured of these layers.
        deeper: the same for a model with more of the same blocks, in some of the runtimes. No whole
            models are measured for these.
        whole_models: those that were measured before, to which further ones are added.

    Raises:
        StageFailed: the model cannot be exported or resized, or the machine is too busy.
    """
    title, whole_models = f"latency of {format}", whole_models or WholeModels()
    context.progress(title, 0, 1, "export")
    with TemporaryDirectory(prefix="compress-auto-") as name:
        folder = Path(name)
        whole: Choice = {}
        if grid or layers is None:
            whole, exports = export_at_random_widths(format, model, context, settings, folder)
            resizable = ResizableModel.fit(exports)
        else:
            resizable = ResizableModel.of_one_size(read(layers.file, weights=True))
        mixed = None if layers is None else layers.mixed(resizable)
        batch = settings.batch or model.signature.smallest_batch
        inputs = context.measured_batches(model.signature, batch)
        specs = model.signature.inputs
        arrays = {s.name: x.numpy() for s, x in zip(specs, inputs[0], strict=True)}
        costs = WidthCosts(mixed or resizable, whole, arrays, table)
        fitted = {} if deeper is None else deeper.fits()
        unfitted = [runtime for runtime in runtimes if runtime not in fitted]
        scopes: list[tuple[str, ...]] = [
            pair
            for pair in resizable.groups_together()
            if {*pair} <= grid.keys()
            and (deeper is None or unfitted or not deeper.has_pair(pair, grid))
        ]
        unsuitable = (
            "the file has other layers with weights once it is cut" if mixed is None else ""
        )
        decided = DecidedLayers((), {}, (), unsuitable)
        if layers is not None and mixed is not None:
            most = settings.space.float_layers
            decided = decide_layers(
                layers, mixed, costs, grid, most, deadline, context.progress, title
            )
        seconds, weight_bytes, file_bytes = measure_grid(
            costs,
            {**grid, **decided.grid},
            [*sorted(scopes), *decided.scopes],
            lambda done, total: context.progress(title, done, total, "kernels"),
        )
        chosen = _spread(grid, [*decided.grid], FITTED_MODELS, context.seed)
        measured: dict[Runtime, list[float]] = {runtime: [] for runtime in unfitted}
        sizes: dict[Runtime, list[int]] = {runtime: [] for runtime in unfitted}
        for number, choice in enumerate(chosen if unfitted else []):
            context.progress(title, number, FITTED_MODELS, "whole models")
            changed = costs.model.resize({**whole, **choice})
            file = write_alone(changed, folder / f"fitted{number}")
            for runtime in unfitted:
                key = json.dumps([format, runtime, choice], sort_keys=True)
                if key not in whole_models.known:
                    served = open_as_served(file, runtime, model.signature, context.threads)
                    whole_models.add(key, measure_ms(served.open), served.bytes)
                measured_ms, size = whole_models.known[key]
                measured[runtime].append(1e-3 * measured_ms)
                sizes[runtime].append(size)
    for runtime in unfitted:
        kernel_costs = [costs.at(choice) for choice in chosen]
        # Each weight is as large in any runtime; what is written besides differs.
        ratio, added = np.polyfit([file_bytes(c) for c in chosen], sizes[runtime], 1).tolist()
        fitted[runtime] = RuntimeFit(
            LatencyModel.fit(kernel_costs, measured[runtime]), ratio, added
        )
    quantized = dict.fromkeys(decided.grid, QUANTIZED)
    found = []
    for runtime in runtimes:
        fit = fitted[runtime]
        parts = [(1e3 * fit.latency.per_kernel_second, seconds)]
        parts.append((1e3 * fit.latency.per_weight_byte, weight_bytes))
        predicted_ms = InteractionSum.combine(parts, 1e3 * fit.latency.per_call)
        predicted_bytes = InteractionSum.combine([(fit.bytes_ratio, file_bytes)], fit.bytes_added)
        if deeper is not None and not unfitted:
            known = deeper.models[runtime]
            predicted_ms = deeper.with_pairs(predicted_ms, known.latency_ms, grid)
            predicted_bytes = deeper.with_pairs(predicted_bytes, known.bytes, grid)
        built = FormatModel(
            format,
            predicted_ms,
            predicted_bytes,
            runtime,
            fit=fit,
            layers=decided,
            whole={group: widths[0] for group, widths in grid.items()} | quantized,
            smallest={group: widths[-1] for group, widths in grid.items()} | quantized,
        )
        found.append(built)
    return found


def export_at_random_widths(
    format: Format, model: EagerModel, context: Context, settings: AutoSettings, folder: Path
) -> tuple[dict[str, int], Iterator[tuple[dict[str, int], ir.Model]]]:
    """Return the model's own widths, and yield exports of it in a format at a few random ones."""
    widths = settings.space.widths
    variants = WidthVariants(model, widths.selection if widths else None, context.seed)
    quantizing, few = QUANTIZING.get(format, {}), context.data
    if quantizing.get("stage") == "quantize_static":
        # All layers smoothed alike: which ones `auto` leaves alone differs from model to model.
        quick = {"smooth": SMOOTHING, "calibration_samples": CALIBRATION_SAMPLES}
        quantizing = {**quantizing, **quick}
    if quantizing:
        data = context.need_data("compress auto")
        samples: Any = data.split("val")
        (few, *_) = data.interleaved_parts("val", max(1, len(samples) // COMPARED_SAMPLES))
        few = replace(few, datasets={**data.datasets, **few.datasets})

    def exports() -> Iterator[tuple[dict[str, int], ir.Model]]:
        # Zero points of 4 bits stand two in a byte, and each group of inputs has one.
        round_to = 32 if format.startswith("weights") else 1
        built = variants.build_some(MOST_EXPORTS, folder, round_to)
        for number, (own, variant) in enumerate(built):
            context.progress(f"latency of {format}", number, MOST_EXPORTS, "export")
            source: Any = variant
            if format != "float":
                inner = replace(context.with_root(folder / f"int8-{number}"), data=few)
                source = stages()[quantizing["stage"]].model_validate(quantizing)(variant, inner)
            yield own, graph_to_serve(source, "auto")

    return variants.whole, exports()


def _spread(grid: Grid, layers: Sequence[str], count: int, seed: int) -> list[dict[str, Value]]:
    """Return the largest and the smallest widths of a grid, and random ones between.

    Every second one has random layers in float.
    """
    generator = random.Random(seed)
    chosen = spread_widths(grid, count, generator)
    for choice in chosen[2::2]:
        choice |= {decision: generator.choice((QUANTIZED, FLOAT)) for decision in layers}
    return [{**dict.fromkeys(layers, QUANTIZED), **choice} for choice in chosen]


def decision_of(layer: str) -> str:
    """Return the name of the decision about a layer's format; groups of channels have others."""
    return f"format of {layer}"


@dataclass(frozen=True)
class LayerSensitivity:
    """What single layers of a quantized format lose."""

    file: Path
    """The ONNX file of the whole model in this format."""
    numbers: Mapping[str, tuple[int, ...]]
    """Layer → its numbers among the layers with weights; several where it is called several
    times."""
    loss_increases: Mapping[str, float]
    """Layer → the squared distance of the outputs that quantizing it alone adds."""

    def mixed(self, model: ResizableModel) -> MixedModel | None:
        """Return a resizable model with these layers to decide.

        None where it has other layers than the file, as where pruning rewrites modules.
        """
        if len(weighted_layers(model.model)) != len(weighted_layers(read(self.file))):
            return None
        return MixedModel(model, {decision_of(name): own for name, own in self.numbers.items()})


@dataclass(frozen=True)
class DecidedLayers:
    """The layers of a format that a search decides about."""

    names: tuple[str, ...]
    loss_increase: Mapping[str, Mapping[Value, float]]
    """Decision → quantized or float → what is lost so."""
    scopes: Sequence[tuple[str, ...]]
    """Decisions that meet in a kernel."""
    unsuitable: str = ""
    """Why there can be none."""

    @property
    def grid(self) -> dict[str, tuple[Value, ...]]:
        """The values of each decision."""
        return dict.fromkeys(self.loss_increase, (QUANTIZED, FLOAT))

    @property
    def total_loss_increase(self) -> float:
        """What all of these layers lose together where they are quantized."""
        return sum(own[QUANTIZED] for own in self.loss_increase.values())


def decide_layers(
    layers: LayerSensitivity,
    mixed: MixedModel,
    costs: WidthCosts,
    grid: Mapping[str, Sequence[Value]],
    most: int,
    deadline: float,
    progress: Progress,
    title: str,
) -> DecidedLayers:
    """Choose the layers that are worth a decision, and find which decisions meet in a kernel.

    They are those that are faster in float, and then those that lose most. What is measured for
    each grows with the widths that it reads and writes; a layer for which no time is left until a
    deadline stays quantized.
    """
    base = costs.at({}).seconds
    start, changes = time.monotonic(), {}
    for done, name in enumerate(layers.loss_increases):
        progress(title, done, len(layers.loss_increases), f"{name} in float")
        if time.monotonic() > deadline:
            break
        decision = decision_of(name)
        changes[name] = costs.at({decision: FLOAT}).seconds - base
    seconds_each = (time.monotonic() - start) / max(1, len(changes))
    total = sum(layers.loss_increases.values())
    worth = [
        name
        for name, change in changes.items()
        if layers.loss_increases[name] > SMALL_LOSS_SHARE * total
        or change < -MUCH_FASTER_SHARE * base
    ]
    worth.sort(
        key=lambda name: (changes[name] >= -MUCH_FASTER_SHARE * base, -layers.loss_increases[name])
    )
    chosen: list[str] = []
    scopes: list[tuple[str, ...]] = []
    left = deadline - time.monotonic()
    for name in worth[:most]:
        decision = decision_of(name)
        groups = sorted(mixed.groups_of(decision) & grid.keys())
        # Kernels of more than two groups of channels, as after joins, are not looked at together.
        own = [(decision, *groups)] if len(groups) < 3 else [(decision, g) for g in groups]
        met = [other for other in chosen if mixed.meet(other, decision)]
        own += [(other, decision) for other in met]
        left -= seconds_each * sum(prod(len(grid.get(d, (FLOAT,))) for d in s) for s in own)
        if left < 0:
            break
        chosen.append(decision)
        scopes += own
    names = tuple(name for name in worth if decision_of(name) in chosen)
    return DecidedLayers(
        names,
        {decision_of(name): {QUANTIZED: layers.loss_increases[name], FLOAT: 0.0} for name in names},
        scopes,
    )
