"""What a candidate would take, in time and in bytes, before it is built.

How both follow from widths and layers in float, for each format of numbers. Few models are
exported; those at all other widths are made from these files by resizing weights. Or a file holds
the latencies of another machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np

from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.sealed_json import read_sealed, read_state, write_sealed, write_state
from compress.export.exporter import EXPORTERS
from compress.export.latency import served_latency
from compress.export.latency.resizing import (
    FLOAT,
    MOST_EXPORTS,
    MixedModel,
    ResizableModel,
    weighted_layers,
)
from compress.export.onnx.lowering import translate_small
from compress.export.onnx.proto_io import read
from compress.pipelines.auto.candidates import QUANTIZING, Candidate
from compress.pipelines.config.auto_settings import AutoSettings, Format, Runtime
from compress.pipelines.config.registry import stages
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.latency.widths import WidthVariants
from compress.quantization.stages.static import QuantizeStatic

if TYPE_CHECKING:
    import onnx_ir as ir

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.core.progress import Progress
    from compress.export.latency.kernels import KernelTable
    from compress.profiling.benchmark import Opener
    from compress.profiling.interaction_sum import Choice, Value

    Grid = Mapping[str, Sequence[Value]]

TABLES_FILE = "latency_tables.json"
"""In the results' folder; `latency.json` is what `compress latency` writes there."""
FITTED_MODELS = 16  # models at widths of the grid whose latencies the kernels' sum is fitted to
COMPARED_SAMPLES, SMOOTHING = 16, 0.5
"""Samples with which exports are compared with the float model, and the strength of SmoothQuant:
their speed is looked at, not their answers."""
QUANTIZED = "quantized"  # value of the decision about a layer that is not put back to float
SMALL_LOSS_SHARE = 0.02
"""Share of a format's loss that a layer must have, or be faster in float, to be decided."""
MUCH_FASTER_SHARE = 0.02
"""Share of the time of all kernels by which a layer must be faster in float."""


@dataclass(frozen=True)
class RuntimeFit:
    """How latency and file size in a runtime follow from kernels and weights."""

    latency: served_latency.LatencyModel
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
    other coefficients: both compute the same products and read the same weights. No whole models
    are measured in the runtimes of `deeper`, a model with more of the same blocks.

    `grid` has each group's widths, the model's own first. Measured kernels are added to `table`,
    and whole models, whose latency `measure_ms` measures, to `whole_models`. Of `layers` those may
    be left in float that are worth it, as is found until `deadline` of :func:`time.monotonic`.

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
        mixed = None
        # Pruning may rewrite modules: then the file has other layers with weights.
        if layers is not None and len(weighted_layers(resizable.model)) == len(
            weighted_layers(read(layers.file))
        ):
            decisions = {decision_of(name): own for name, own in layers.numbers.items()}
            mixed = MixedModel(resizable, decisions)
        batch = settings.batch or model.signature.smallest_batch
        inputs = context.measured_batches(model.signature, batch)
        specs = model.signature.inputs
        arrays = {s.name: x.numpy() for s, x in zip(specs, inputs[0], strict=True)}
        costs = served_latency.WidthCosts(mixed or resizable, whole, arrays, table)
        known_models = {} if deeper is None else deeper.models
        fitted = {r: known.fit for r, known in known_models.items() if known.fit is not None}
        unfitted = [runtime for runtime in runtimes if runtime not in fitted]
        scopes: list[tuple[str, ...]] = [
            pair
            for pair in resizable.groups_together()
            if {*pair} <= grid.keys()
            and (deeper is None or unfitted or not deeper.has_pair(pair, grid))
        ]
        unsuitable = "" if mixed else "the file has other layers with weights once it is cut"
        decided = DecidedLayers((), {}, (), unsuitable)
        if layers is not None and mixed is not None:
            most = settings.space.float_layers
            decided = decide_layers(
                layers, mixed, costs, grid, most, deadline, context.progress, title
            )
        seconds, weight_bytes, file_bytes = served_latency.measure_grid(
            costs,
            {**grid, **decided.grid},
            [*sorted(scopes), *decided.scopes],
            lambda done, total: context.progress(title, done, total, "kernels"),
        )
        quantized = dict.fromkeys(decided.grid, QUANTIZED)
        generator = random.Random(context.seed)
        chosen = served_latency.spread_widths(grid, FITTED_MODELS, generator)
        for choice in chosen[2::2]:  # the first two are the largest and the smallest widths
            choice |= {decision: generator.choice((QUANTIZED, FLOAT)) for decision in quantized}
        chosen = [{**quantized, **choice} for choice in chosen]
        figures: dict[Runtime, list[tuple[float, int]]] = {runtime: [] for runtime in unfitted}
        for number, choice in enumerate(chosen if unfitted else []):
            context.progress(title, number, FITTED_MODELS, "whole models")
            changed = costs.model.resize({**whole, **choice})
            file = served_latency.write_alone(changed, folder / f"fitted{number}")
            for runtime in unfitted:
                key = json.dumps([format, runtime, choice], sort_keys=True)
                if key not in whole_models.known:
                    served = served_latency.open_as_served(
                        file, runtime, model.signature, context.threads
                    )
                    whole_models.add(key, measure_ms(served.open), served.bytes)
                figures[runtime].append(whole_models.known[key])
    for runtime in unfitted:
        measured = [1e-3 * milliseconds for milliseconds, _ in figures[runtime]]
        latency = served_latency.LatencyModel.fit([costs.at(c) for c in chosen], measured)
        # Each weight is as large in any runtime; what is written besides differs.
        sizes = [size for _, size in figures[runtime]]
        ratio, added = np.polyfit([file_bytes(c) for c in chosen], sizes, 1).tolist()
        fitted[runtime] = RuntimeFit(latency, ratio, added)
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
        found.append(
            FormatModel(
                format,
                predicted_ms,
                predicted_bytes,
                runtime,
                fit=fit,
                layers=decided,
                whole={group: widths[0] for group, widths in grid.items()} | quantized,
                smallest={group: widths[-1] for group, widths in grid.items()} | quantized,
            )
        )
    return found


def export_at_random_widths(
    format: Format, model: EagerModel, context: Context, settings: AutoSettings, folder: Path
) -> tuple[dict[str, int], Iterator[tuple[dict[str, int], ir.Model]]]:
    """Return the model's own widths, and yield exports of it in a format at a few random ones."""
    widths = settings.space.widths
    selection = widths.selection if widths else None
    variants = WidthVariants(model, selection, context.seed, context.progress)
    quantizing, few = QUANTIZING.get(format, {}), context.data
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
                stage = stages()[quantizing["stage"]].model_validate(quantizing)
                if isinstance(stage, QuantizeStatic):
                    # All layers alike: which ones `auto` leaves alone differs from model to model.
                    stage = stage.calibrated_quickly(smooth=SMOOTHING)
                source = stage(variant, inner)
            yield own, translate_small(source, "auto")[0]

    return variants.whole, exports()


def decision_of(layer: str) -> str:
    """Return the name of the decision about a layer's format; groups of channels have others."""
    return f"format of {layer}"


@dataclass(frozen=True)
class LayerSensitivity:
    """What single layers of a quantized format lose."""

    file: Path
    """The ONNX file of the whole model in this format."""
    numbers: Mapping[str, tuple[int, ...]]
    """Layer → its numbers among the layers with weights; several if it is called several times."""
    loss_increases: Mapping[str, float]
    """Layer → the squared distance of the outputs that quantizing it alone adds."""


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
    costs: served_latency.WidthCosts,
    grid: Mapping[str, Sequence[Value]],
    most: int,
    deadline: float,
    progress: Progress,
    title: str,
) -> DecidedLayers:
    """Choose the layers that are worth a decision, and find which decisions meet in a kernel.

    They are those that are faster in float, and then those that lose most. What is measured for
    each grows with the widths that it reads and writes; without time left a layer stays quantized.
    """
    base, losses = costs.at({}).seconds, layers.loss_increases
    start, changes = time.monotonic(), {}
    for done, name in enumerate(losses):
        progress(title, done, len(losses), f"{name} in float")
        if time.monotonic() > deadline:
            break
        changes[name] = costs.at({decision_of(name): FLOAT}).seconds - base
    seconds_each = (time.monotonic() - start) / max(1, len(changes))
    total = sum(losses.values())
    much_faster = {name for name, change in changes.items() if change < -MUCH_FASTER_SHARE * base}
    worth = [n for n in changes if losses[n] > SMALL_LOSS_SHARE * total or n in much_faster]
    worth.sort(key=lambda name: (name not in much_faster, -losses[name]))
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
        {decision_of(name): {QUANTIZED: losses[name], FLOAT: 0.0} for name in names},
        scopes,
    )


class StoredSum(Settings):
    """A quantity by widths, as JSON holds it; see `InteractionSum`."""

    base: float
    terms: tuple[tuple[tuple[str, ...], tuple[int, ...], float], ...]
    """Groups, their widths, and what changes there beyond what fewer of them change."""

    @classmethod
    def from_sum(cls, quantity: InteractionSum) -> Self:
        """Return a quantity in the form that is stored."""
        return cls(
            base=quantity.base,
            terms=tuple(
                (scope, tuple(map(int, widths)), change)
                for scope, own in quantity.terms.items()
                if any(own.values())
                for widths, change in own.items()
            ),
        )

    def to_sum(self) -> InteractionSum:
        """Return the quantity."""
        terms: dict[tuple[str, ...], dict[tuple[Value, ...], float]] = {}
        for scope, widths, change in self.terms:
            terms.setdefault(scope, {})[widths] = change
        return InteractionSum(self.base, terms)


class ModelTable(Settings):
    """Latency and size of a model in one format and runtime, by its widths."""

    format: Format
    runtime: Runtime
    latency_ms: StoredSum
    bytes: StoredSum

    @classmethod
    def from_model(cls, model: FormatModel) -> Self:
        """Return a model in the form that is stored, without a correction by whole models alone."""
        return cls(
            format=model.format,
            runtime=model.runtime,
            latency_ms=StoredSum.from_sum(model.latency_ms),
            bytes=StoredSum.from_sum(model.bytes),
        )

    def to_model(self, grid: Mapping[str, Sequence[int]]) -> FormatModel:
        """Return what the solver works with."""
        return FormatModel(
            self.format,
            self.latency_ms.to_sum(),
            self.bytes.to_sum(),
            runtime=self.runtime,
            whole={group: widths[0] for group, widths in grid.items()},
            smallest={group: widths[-1] for group, widths in grid.items()},
        )


class LatencyTables(Settings):
    """What a search needs of the machine that will serve."""

    machine: dict[str, Any]
    versions: dict[str, str]
    threads: int
    batch: int
    """Samples of a call."""
    base_ms: float
    """Median time of a call of the float ONNX file, with which all others were measured in turn."""
    grid: dict[str, tuple[int, ...]]
    """Group of coupled channels → its widths, the model's own first."""
    models: tuple[ModelTable, ...]

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read tables that another machine wrote; raise PipelineInvalid where these are none."""
        try:
            return read_sealed(file, cls)
        except (OSError, ArtifactInvalid) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise PipelineInvalid(
                f"--tables {file}: {why}; expected what `compress auto --tables-only` writes"
            ) from error

    def write(self, out: Path) -> Path:
        """Write the tables into the results' folder, and return the file."""
        out.mkdir(parents=True, exist_ok=True)
        write_sealed(out / TABLES_FILE, self)
        return out / TABLES_FILE

    @property
    def digest(self) -> str:
        """A hash of all figures."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def where(self) -> str:
        """The machine that was measured, in words."""
        runtimes = " and ".join(
            f"{name} {self.versions[name]}"
            for name in (EXPORTERS[kind].runtime.name for kind in get_args(Runtime))
            if name in self.versions
        )
        return f"{self.machine.get('processor')}, {self.machine.get('cores')} cores, {runtimes}"

    def lines(self, out: Path) -> Iterator[str]:
        """Yield what was measured, and how a search elsewhere reads it."""
        widths = sum(map(len, self.grid.values()))
        kinds = ", ".join(f"{table.format} in {table.runtime}" for table in self.models)
        file = out / TABLES_FILE
        yield f"latency of {kinds}, over {widths} widths of {len(self.grid)} groups: {file}"
        yield f"on another machine: compress auto PIPELINE.YAML --tables {TABLES_FILE}"

    def format_models(self, format: Format, runtimes: Sequence[Runtime]) -> list[FormatModel]:
        """Return the models of a format in some runtimes, with figures that are predictions."""
        return [
            table.to_model(self.grid)
            for table in self.models
            if table.format == format and table.runtime in runtimes
        ]

    def latency_ms(self, candidate: Candidate) -> float:
        """Return the predicted latency of a candidate, in milliseconds."""
        for model in self.format_models(candidate.format, [candidate.runtime]):
            return model.latency_ms({**model.whole, **dict(candidate.widths)})
        return self.base_ms  # the float model itself, where no float ones are searched

    def refuse_other_settings(self, settings: AutoSettings, threads: int) -> None:
        """Raise PipelineInvalid for other threads, a missing format or runtime, or a p95."""
        limit = settings.limits.latency
        if limit is not None and limit.p95_ms is not None:
            raise PipelineInvalid(
                "latency tables hold medians: limit p50_ms (--latency), and p95_ms by a gate "
                "max_latency in a point's pipeline, where it runs"
            )
        self.refuse_blocks(settings)
        self._refuse_other_calls("threads", self.threads, threads)
        known = {(table.format, table.runtime) for table in self.models}
        for format in settings.space.formats:
            for runtime in settings.space.runtimes:
                if (format, runtime) not in known:
                    has = ", ".join(f"{f} in {r}" for f, r in sorted(known))
                    raise PipelineInvalid(
                        f"the latency tables have no {format} in {runtime}, only {has}; measure "
                        "again, or leave it out of auto.space"
                    )

    def refuse_other_model(self, grid: Mapping[str, Sequence[int]], batch: int) -> None:
        """Raise PipelineInvalid for other groups of channels, other widths, or another batch."""
        self._refuse_other_calls("batch", self.batch, batch)
        for group in sorted(self.grid.keys() | grid.keys()):
            there, here = self.grid.get(group), grid.get(group)
            if list(there or ()) != list(here or ()):
                raise PipelineInvalid(
                    f"the latency tables are of another model or of other widths: {group!r} has "
                    f"{json.dumps(there)} in them, and {json.dumps(here)} here; measure again "
                    "with this file"
                )

    @staticmethod
    def refuse_blocks(settings: AutoSettings) -> None:
        """Raise PipelineInvalid where blocks may be removed: tables are of all of them."""
        if settings.space.blocks:
            raise PipelineInvalid(
                "auto.space.blocks: latency tables are of models with all their blocks, and which "
                "are removed depends on the weights; leave it out with --tables and --tables-only"
            )

    @staticmethod
    def _refuse_other_calls(name: str, measured: int, asked: int) -> None:
        if measured != asked:
            raise PipelineInvalid(
                f"the latency tables are of calls with {name} {measured}, and those of the search "
                f"have {asked}; measure again with the same"
            )
