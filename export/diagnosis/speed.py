"""What makes a file slower than a gate allows: its profile, and the time of changed files."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import onnx_ir as ir

from compress.export.diagnosis.profile import (
    Profile,
    ProfiledGraph,
    as_onnx,
    fitting_names,
    plain_export,
)
from compress.export.latency.float_layers import leave_float, weighted_layers
from compress.export.onnx.graph import remove_unread_
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import opened_session
from compress.profiling.benchmark import compare_latency

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context
    from compress.profiling.benchmark import Comparison, Opener
    from compress.profiling.quantiles import Interval

    Rerun = Callable[[str, Mapping[str, Any]], ir.Model | None]


@dataclass(frozen=True)
class SpeedGate:
    """What a refused gate on speed found, measured once more."""

    interval: Interval
    """Of the speedup, or of the 95th percentile in milliseconds."""
    middle: float
    limit: float
    higher_passes: bool
    batch: int
    earlier: float | None
    """What the gate found in the run."""

    @property
    def value(self) -> float:
        """What is held against the limit."""
        return self.interval.low if self.higher_passes else self.middle

    @property
    def spread_in_margin(self) -> float:
        """How far measurements lie apart, as a multiple of the distance to the limit.

        It is half the interval's width, or the distance to what the run has found.
        """
        spread = (self.interval.high - self.interval.low) / 2
        margin = abs(self.value - self.limit)
        if self.earlier is not None:
            spread = max(spread, abs(self.value - self.earlier))
            margin = min(margin, abs(self.earlier - self.limit))
        return spread / margin if margin else float("inf")

    @property
    def factor(self) -> float:
        """How many times faster the file must be for the gate to pass."""
        if self.higher_passes:
            return self.limit / self.interval.low if self.interval.low > 0 else float("inf")
        return self.middle / self.limit


@dataclass
class SpeedDiagnosis:
    """An ONNX file that is too slow: where its time goes, and what of it changes would save."""

    model: ir.Model
    names: list[str]
    """Modules of the file's layers."""
    gate: SpeedGate
    ms: float
    """Median time of a call."""
    profile: Profile
    float_profile: Profile
    """Of the plain export of the float model that the file was made of."""
    rerun: Rerun
    """Returns the file that the stages would make with other settings of one of them, None where
    that would take training."""
    context: Context
    batches: Sequence[Sequence[torch.Tensor]]
    """What the gate measures on."""
    measured: int = 0
    """How many changed files were timed."""
    _saved: dict[str, float] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        file: Artifact,
        source: EagerModel | GraphModel,
        gate: SpeedGate,
        ms: float,
        rerun: Rerun,
        context: Context,
    ) -> Self:
        """Profile a file, and the plain export of its float model.

        Raises:
            StageFailed: the file is not taken apart, or the float model cannot be exported.
        """
        model = as_onnx(file)
        plain, names = plain_export(source)
        batches = context.measured_batches(file.signature, gate.batch)
        profile, float_profile = (
            Profile.measure(m, names, batches[0], context.threads) for m in (model, plain)
        )
        names = fitting_names(model, names)
        return cls(model, names, gate, ms, profile, float_profile, rerun, context, batches)

    @cached_property
    def graph(self) -> ProfiledGraph:
        """The profiled operators, to be followed."""
        return ProfiledGraph(self.profile)

    @property
    def missing_ms(self) -> float:
        """By how much a call must become shorter."""
        return self.ms - self.ms / self.gate.factor

    def share(self, ms: float) -> float:
        """Return a time of kernels as a share of all kernels'."""
        return ms / self.profile.ms if self.profile.ms else 0.0

    def returned(self, saved_ms: float) -> float:
        """Return a saved time as a share of what must be saved."""
        return saved_ms / self.missing_ms if self.missing_ms > 0 else 0.0

    def saved_by(self, key: str, change: Callable[[], ir.Model | None]) -> float:
        """Return the milliseconds that a changed file saves, measured once; 0 if it may be noise.

        Args:
            key: what tells the change from others.
            change: makes the changed file; None where it cannot be made.
        """
        if key not in self._saved:
            changed = change()
            self._saved[key] = 0.0 if changed is None else self._measure(changed)
        return self._saved[key]

    def saved_in_float(self, modules: Collection[str]) -> float:
        """Return the milliseconds that a file with more layers in float saves."""
        layers = weighted_layers(self.model)
        numbers = [i for i in range(len(layers)) if self.names[i] in modules]
        key = f"float {numbers}"
        return self.saved_by(key, lambda: leave_float(self.model, numbers)) if numbers else 0.0

    def saved_with(self, stage: str, settings: Mapping[str, Any]) -> float:
        """Return the milliseconds that other settings of a stage save."""
        key = f"{stage} {sorted(settings.items())}"
        return self.saved_by(key, lambda: self.rerun(stage, settings))

    @cached_property
    def empty_call_ms(self) -> float:
        """Time of a call of a model with the same inputs that computes nothing."""
        empty = self.model.clone()
        value = empty.graph.inputs[0]
        unchanged = ir.Value(name="unchanged", type=value.type, shape=value.shape)
        empty.graph.insert_before(empty.graph[0], ir.node("Identity", [value], outputs=[unchanged]))
        empty.graph.outputs.clear()
        empty.graph.outputs.append(unchanged)
        remove_unread_(empty)
        return self.ms / self._compared(empty).speedup

    def _measure(self, changed: ir.Model) -> float:
        compared = self._compared(changed)
        is_faster = compared.interval.low > 1 and not compared.speedup_doubt
        return self.ms * (1 - 1 / compared.speedup) if is_faster else 0.0

    def _compared(self, changed: ir.Model) -> Comparison:
        self.measured += 1
        with TemporaryDirectory(prefix="compress-timed-") as folder:
            openers: list[Opener] = []
            for name, model in (("own", self.model), ("changed", changed)):
                file = Path(folder) / name / "model.onnx"
                file.parent.mkdir()
                write(model, file)
                openers.append(partial(opened_session, file, self.context.threads))
            own, other = openers
            return compare_latency(own, other, self.batches, threads=self.context.threads)
