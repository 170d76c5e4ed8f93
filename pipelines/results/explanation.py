"""`explain.json`: why gates refused a stage, and the repairs that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import JsonValue

from compress.common.config import Settings
from compress.common.errors import first_few
from compress.common.sealed_json import read_if_unchanged, write_sealed
from compress.core.verdict import Verdict
from compress.pipelines.system.templates import readable_bytes, readable_count

if TYPE_CHECKING:
    from compress.pipelines.results.schema import Report

EXPLANATION_FILE = "explain.json"
MAX_COSTS_SHOWN = 6  # modules whose cost is shown in the text; the file has all
FLOAT_MACS = "float MACs"  # unit of what float kernels multiply, of which a share of all is shown
MIN_COST_SHOWN = 0.01  # share of the whole that is shown
NAMED_IF_REMOVED = ("calibration_samples", "learning_rate", "temperature", "soft_weight")
"""Settings whose removal is said in the line of a repair; others only make room."""


class StageShare(Settings):
    """What one stage brings of a loss."""

    stage: str
    points: float
    """Points by which the metric on `val` gets worse in this stage; negative where better."""


class LayerSet(Settings):
    """Layers that were put back as they were before the stage."""

    layers: tuple[str, ...]
    recovered: float
    """Share of the stage's loss that returned, on the half of `val` that decides."""


class GuiltyLayer(Settings):
    """A layer, a group of channels or a block that loses accuracy."""

    layer: str
    alone: float | None
    """Share of the loss that it costs when all other layers are in float; None where more layers
    are guilty than could be judged alone."""
    own_sqnr_db: float | None = None
    """Signal to quantization noise ratio of its output, with float inputs; None of other stages."""


class ModuleCost(Settings):
    """What one module of the user's costs in the refused file."""

    module: str
    before: float | None
    """In the plain export of the float model; None where that has no such module."""
    now: float


class FoundCause(Settings):
    """A test of a cause whose value is above its threshold."""

    cause: str
    layers: dict[str, float]
    """Layer → the measured value, the largest first; the stage as a whole has an empty name."""
    limit: float
    returned: float | None
    """Share of the loss that returns without the cause in these layers; None where unknown."""
    text: str
    """The cause in words, with the largest value and the limit."""


class TriedRepair(Settings):
    """A repair that was run and judged by the gates."""

    settings: dict[str, JsonValue]
    """What was changed in the settings of the stage."""
    stage: str = ""
    beside: dict[str, dict[str, JsonValue]] = {}
    """Stage → settings that were changed before, to mend another refusal."""
    passed: bool
    verdicts: dict[str, tuple[Verdict, ...]] = {}
    """Stage → what its gates found."""
    value: float | None = None
    """What the refused gate found; None where it was not measured."""
    latency_ms: float | None = None
    bytes: int | None = None
    """Size of the file that the last stage which ran has written."""
    error: str = ""
    seconds: float = 0.0

    @property
    def edits(self) -> dict[str, dict[str, JsonValue]]:
        """All changes: stage → settings."""
        own = {**self.beside.get(self.stage, {}), **self.settings}
        return {**self.beside, self.stage: own}

    @property
    def name(self) -> str:
        """The changed settings in a line, with the stages' names where there are several."""
        if not self.beside:
            return _in_a_line(self.settings)
        return "; ".join(f"{stage}: {_in_a_line(s)}" for stage, s in self.edits.items())


class Explanation(Settings):
    """Why a gate refused a stage, or what one that passed costs."""

    stage: str
    """The stage that has the gate."""
    verdict: Verdict
    artifact: str
    """Digest of what the stage made; empty for an export that failed."""
    metric: str
    split: tuple[StageShare, ...]
    """The loss between what the gate compares with and the stage, by the stages between."""
    culprit: str | None
    """The stage that brings most of it; None where nothing is lost."""
    parts: str = "layers"
    """What was put back, in words: `layers`, `groups` of channels, `blocks`."""
    put_back: str = "in float"
    """How these are then, in words."""
    layers: int = 0
    """How many layers of the culprit could be put back."""
    samples: int = 0
    """Samples of `val` that decided."""
    points: float | None = None
    """What the culprit loses on these samples; None where its metric is not finite."""
    sets: tuple[LayerSet, ...] = ()
    """All sets of layers that were put back, in order."""
    guilty: tuple[GuiltyLayer, ...] = ()
    """The layers that lose it, worst first."""
    recovered: float | None = None
    """Share of the loss that returns with all of them in float."""
    confirmed: float | None = None
    """The same on the other half of `val`."""
    spread: bool = False
    """Whether no quarter of the layers returns half of the loss."""
    costs: tuple[ModuleCost, ...] = ()
    """Of gates that are not about outputs: what each module costs, the dearest first."""
    unit: str = ""
    """Of these: `ms`, `bytes`, `weights` or `float MACs`."""
    causes: tuple[FoundCause, ...] = ()
    """The likeliest first."""
    repairs: tuple[dict[str, JsonValue], ...] = ()
    """Changes of the culprit's settings that may mend it, in the order in which they are tried."""
    tried: tuple[TriedRepair, ...] = ()
    notice: str = ""
    """Why there is no more to say."""
    judgings: int = 0
    seconds: float = 0.0

    def lines(self, rule: str) -> Iterator[str]:
        """Yield the explanation in lines, given the gate's rule in words."""
        found = "not measured" if self.verdict.value is None else f"{self.verdict.value:.3g}"
        outcome = "passed" if self.verdict.passed else "refused"
        yield f"{self.stage}: {rule}: found {found}, {outcome}"
        brought = [f"{s.stage} {s.points:+.3g}" for s in self.split]
        if brought:
            yield f"  stage   points lost: {', '.join(brought)}"
        if self.guilty:
            names = [g.layer for g in self.guilty]
            back = "" if self.recovered is None else f"{self.recovered:.0%}"
            lost = "all" if self.points is None else f"{self.points:.3g}"
            other = "" if self.confirmed is None else f", {self.confirmed:.0%} on the other half"
            yield f"  {self.parts:7} {first_few(names, 6)}: {len(names)} of {self.layers}"
            yield (
                f"          {self.put_back} they return {back} of {lost} points on "
                f"{self.samples} samples{other}"
            )
        if self.spread:
            yield (
                f"  {self.parts:7} spread over the model: no quarter of the {self.parts} returns "
                "half of it"
            )
        if self.costs:
            is_share = self.unit == FLOAT_MACS
            total = sum((c.before or 0) if is_share else c.now for c in self.costs) or 1
            dearest = [
                f"{c.module or 'the rest'} {c.now / total:.0%}"
                + (f" ({c.now / c.before:.2g}×)" if c.before and c.now else "")
                for c in self.costs[:MAX_COSTS_SHOWN]
                if c.now >= MIN_COST_SHOWN * total
            ]
            label, whole = {
                "ms": ("time", f"{total:.3g} ms"),
                "bytes": ("bytes", readable_bytes(round(total))),
                FLOAT_MACS: ("float", f"{readable_count(round(total))} multiply-accumulates"),
            }.get(self.unit, (self.unit, readable_count(round(total))))
            yield f"  {label:7} {', '.join(dearest) or 'nothing'} of {whole}"
            yield "          (×: as much as in the plain export of the float model)"
        for cause in self.causes:
            where = f"{', '.join([*cause.layers][:3])}: " if any(cause.layers) else ""
            more = f" (and {len(cause.layers) - 3} more layers)" if len(cause.layers) > 3 else ""
            share = "" if cause.returned is None else f"; without it {cause.returned:.0%} returns"
            yield f"  cause   {where}{cause.text}{more}{share}"
        if self.notice:
            yield f"  note    {self.notice}"
        for repair in self.tried:
            value = "" if repair.value is None else f" found {repair.value:.3g},"
            outcome = "passes" if repair.passed else repair.error or "refused"
            latency = "" if repair.latency_ms is None else f", {repair.latency_ms:.3g} ms"
            yield f"  tried   {repair.name}:{value} {outcome}{latency}"
        if self.repairs and not self.tried:
            names_of = [TriedRepair(settings=r, passed=False).name for r in self.repairs]
            yield f"  to try  {'; '.join(names_of[:3])}"
        verb = "measured" if self.costs else "judged"
        yield f"          {self.judgings} models {verb}, {self.seconds:.1f} s"


class Explanations(Settings):
    """All explanations of a run."""

    explanations: tuple[Explanation, ...]
    chosen: dict[str, dict[str, JsonValue]] | None = None
    """Stage → the changed settings with which all gates pass; None where none were found."""
    nearest: str | None = None
    """Of the repairs that were tried, the one after which the gate misses its limit by least."""

    def write(self, out: Path) -> None:
        """Write `explain.json` into a run's folder."""
        write_sealed(out / EXPLANATION_FILE, self)

    @classmethod
    def read(cls, out: Path, report: Report) -> Self | None:
        """Read what explains a report's artifacts; None where there is none, or of another run."""
        found = read_if_unchanged(out / EXPLANATION_FILE, cls)
        if found is None:
            return None
        digests = {stage.name: stage.artifact.digest for stage in report.stages}
        same = all(digests.get(e.stage, "") == e.artifact for e in found.explanations)
        return found if same else None


def _in_a_line(settings: Mapping[str, JsonValue]) -> str:
    # A removed setting is that of its default.
    return ", ".join(
        f"{name}: {'default' if value is None else _short(value)}"
        for name, value in settings.items()
        if value is not None or len(settings) == 1 or name in NAMED_IF_REMOVED
    )


def _short(value: JsonValue) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_short(v)}' for k, v in value.items())}}}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value[:3]))}{', …' if len(value) > 3 else ''}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
