"""The base class of causes: a test with a number and a threshold of why a gate refused a stage.

`compress explain` runs the tests on a stage whose result a gate refused, and `compress repair`
tries what they name. A cause of another package is a subclass that declares the same attributes,
and an entry point of the group ``compress.causes``, so that a stage of one's own brings its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.diagnosis.rerun import RerunStage
    from compress.core.stage import Stage

ENTRY_POINT_GROUP = "compress.causes"
"""Where installed packages announce causes of their own."""
ACCURACY_GATES = ("max_drop", "max_relative_drop", "min_metric", "label_agreement")
"""Gates whose value is points of a metric, or follows from them."""
SPEED_GATES = ("min_speedup", "max_latency")
SIZE_GATES = ("max_size", "max_file_size")
MEMORY_GATES = ("max_memory",)
PARAMETER_GATES = ("max_parameters",)
MACS_GATES = ("min_integer_macs",)
PARITY_GATES = ("parity",)

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
        if self.settings.keys() & other.settings.keys() or "stage" in {
            *self.settings,
            *other.settings,
        }:
            return None
        return Repair({**self.settings, **other.settings}, max(self.cost, other.cost))


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
    """The same stage with other settings, and the metric on `train`; None for stages that have no
    metric."""


class Cause(Generic[Measured]):
    """A reason why a stage loses accuracy, or is too slow, too large or wrong."""

    key: ClassVar[str]
    """Its name in a report; by default the class's, in lower case with underscores."""
    stages: ClassVar[tuple[str, ...]]
    """Kinds of stages that it is tested on."""
    gates: ClassVar[tuple[str, ...]] = ACCURACY_GATES
    """Gates whose refusals it explains."""
    limit: ClassVar[float]
    """Threshold: the cause is found where the measured value is above it."""
    text: ClassVar[str]
    """The finding for users, with the placeholders `{value}` and `{limit}`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "key" not in vars(cls):
            cls.key = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def measure(self, refused: RefusedStage[Measured], layer: str) -> float | None:
        """Return the value for a layer, or for the stage as a whole (`layer` is empty).

        None where the test does not apply.
        """
        raise NotImplementedError

    def returned(self, refused: RefusedStage[Measured], layers: Sequence[str]) -> float | None:
        """Return the share of the loss that would return without the cause; None where unknown.

        Of other gates: the share of what the limit is missed by.
        """
        return None

    def repairs(self, refused: RefusedStage[Measured], layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return changes that may mend the cause in the layers that have it, cheapest first."""
        return ()

    def in_words(self, value: float) -> str:
        """Describe the cause with its value and its threshold."""
        return self.text.format(value=value, limit=self.limit)
