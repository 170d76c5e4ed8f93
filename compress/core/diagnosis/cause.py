"""Causes of a refusal: a test with a number and a threshold, a sentence, and what may mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.diagnosis.layer_diagnosis import RerunStage
    from compress.core.stage import Stage
    from compress.core.verdict import Verdict

ENTRY_POINT_GROUP = "compress.causes"
"""Where packages announce a :class:`Cause`, or a tuple of them."""
AGREEMENT_GATES = ("label_agreement", "max_disagreement")
"""Gates that count the samples that another model answers alike."""
ACCURACY_GATES = ("max_drop", "max_relative_drop", "min_metric", *AGREEMENT_GATES)
"""Gates whose value is points of a metric, or follows from them."""
SPEED_GATES = ("min_speedup", "max_latency")
SIZE_GATES = ("max_size", "max_file_size")
MEMORY_GATES = ("max_memory",)
PARAMETER_GATES = ("max_parameters",)
MACS_GATES = ("min_integer_macs",)
PARITY_GATES = ("parity",)
EXPLAINED_GATES: tuple[str, ...] = ACCURACY_GATES + SPEED_GATES + SIZE_GATES + MEMORY_GATES
EXPLAINED_GATES += PARAMETER_GATES + MACS_GATES + PARITY_GATES


def is_explained(verdict: Verdict) -> bool:
    """Tell whether `compress explain` looks for causes; of a device, the report names a layer."""
    return verdict.gate in EXPLAINED_GATES and not verdict.on


Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Repair:
    """A change of a stage's settings that may mend a cause."""

    settings: Mapping[str, JsonValue]
    """Settings to change; None removes one. With `stage`, it becomes another stage of the same
    name, input and gates."""
    cost: int
    """What it costs the other gates: 0 nothing, 1 size, 2 some latency, 3 more of both, 4 training.
    Cheaper ones are tried first."""

    @property
    def trains(self) -> bool:
        """Whether it trains, which is not tried unless that is allowed."""
        return self.cost >= 4

    def joined(self, other: Repair) -> Repair | None:
        """Return both changes as one; None where they set the same."""
        # Another stage need not have the settings of this one.
        both = {**self.settings, **other.settings}
        if self.settings.keys() & other.settings.keys() or "stage" in both:
            return None
        return Repair(both, max(self.cost, other.cost))


def excluding(own: Mapping[str, Any], layers: Iterable[str], cost: int) -> Repair:
    """Return a repair that adds layers to `exclude` of a stage's own settings."""
    return Repair({"exclude": [*dict.fromkeys((*own["exclude"], *layers))]}, cost)


def changing(own: Mapping[str, Any], repairs: Iterable[Repair]) -> tuple[Repair, ...]:
    """Return the repairs that set something else than a stage's own settings do."""
    return tuple(r for r in repairs if any(own.get(k) != v for k, v in r.settings.items()))


@dataclass(frozen=True)
class RefusedStage(Generic[Measured]):
    """A stage whose result a gate refuses, and what was measured of it."""

    stage: Stage[Any, Any]
    before: Artifact
    """What it read."""
    after: Artifact
    """What it made."""
    context: Context
    layers: tuple[str, ...]
    """The layers that lose the accuracy, worst first; empty where they are not known."""
    measured: Measured
    """What the stage's own diagnosis measured; None where it has none."""
    max_points: float
    """What the refused gate allows; 0 for gates that are not about points of a metric."""
    rerun: RerunStage | None = None
    """The same stage with other settings, and the metric on `train`; None without a metric."""


@dataclass(frozen=True)
class Cause:
    """A reason why a stage loses accuracy, or is too slow, too large or wrong: a row of a table."""

    key: str
    """Its name in a report."""
    stages: tuple[str, ...]
    """Kinds of stages that it is tested on."""
    limit: float
    """Threshold: the cause is found where the measured value is above it."""
    text: str
    """The finding for users, with the placeholders `{value}` and `{limit}`."""
    measure: Callable[[RefusedStage[Any], str], float | None]
    """Measures the value for a layer, or for the stage as a whole (the layer is empty); None where
    the test does not apply."""
    recovered_share: Callable[[RefusedStage[Any], Sequence[str]], float | None] = lambda *_: None
    """Returns the share of the loss that would return without the cause in some layers, of other
    gates the share of what the limit is missed by; None where unknown."""
    repairs: Callable[[RefusedStage[Any], Sequence[str]], tuple[Repair, ...]] = lambda *_: ()
    """Returns changes that may mend the cause in the layers that have it."""
    gates: tuple[str, ...] = ACCURACY_GATES
    """Gates whose refusals it explains."""

    def in_words(self, value: float) -> str:
        """Describe the cause with its value and its threshold."""
        return self.text.format(value=value, limit=self.limit)
