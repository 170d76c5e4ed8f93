"""How far an exported model's outputs may be from its source's, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from compress.artifacts.graph_model import GraphModel

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact


class Tolerance(NamedTuple):
    """Largest errors of an export that is taken for a right one.

    They separate a right graph from a wrong one; how accurate a model must be is for a gate.
    """

    relative: float
    """Norm of the error over the norm of the output, for one input."""
    adversarial: float
    """The same on adversarial inputs."""
    spread: float
    """Error over `val`, relative to how much the outputs differ from sample to sample."""
    label_changes: float
    """Fraction of `val` samples whose predicted label may change, near-ties left out."""


# float32 sums in another order differ by some 1e-6 of the norm, and by more in deep models. The
# spread between samples may be a small part of the norm, hence ten times as much of it.
FLOAT = Tolerance(relative=1e-3, adversarial=1e-3, spread=1e-2, label_changes=0.01)

# A float that differs in its last bit may round to the next integer, and such flips add up from
# layer to layer. Outputs at chance have an error of 1 of the spread or more.
QUANTIZED = Tolerance(relative=0.1, adversarial=0.3, spread=0.3, label_changes=0.05)


def tolerance_for(source: Artifact) -> Tolerance:
    """Return the tolerance for exports of a model: graphs may compute in integers."""
    return QUANTIZED if isinstance(source, GraphModel) else FLOAT
