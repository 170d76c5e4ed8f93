"""What an integer graph says about how far it gives the labels it was trained for; no torch."""

from __future__ import annotations

from compress.core.errors import StageFailed
from compress.core.settings import Settings

LARGEST_SHARE = 0.005
"""Of labels that differ and are no near-ties; more, and the graph is another model."""


class Sameness(Settings):
    """A trained model that rounds in floats beside the integer graph made of it."""

    labels: int
    """How many were compared."""
    differing: int
    """Of these, how many differ."""
    near_ties: int | None
    """Of these, those where the trained model's two largest outputs lie within `last_step` of each
    other; None where no such step can be told."""
    last_step: float | None
    """The last step of rounding as the outputs see it."""
    largest_difference: float
    """Of outputs."""

    def and_of(self, more: Sameness) -> Sameness:
        """Return what holds of these samples and of more."""
        ties = None
        if self.near_ties is not None and more.near_ties is not None:
            ties = self.near_ties + more.near_ties
        return Sameness(
            labels=self.labels + more.labels,
            differing=self.differing + more.differing,
            near_ties=ties,
            last_step=self.last_step,
            largest_difference=max(self.largest_difference, more.largest_difference),
        )

    def line(self) -> str:
        """Return the comparison in one line."""
        equal = f"{self.labels - self.differing} of {self.labels} labels as trained"
        if not self.differing:
            return equal
        if self.near_ties is None:
            return f"{equal}; the last quantization step is not known"
        step = f"margins below the last quantization step, {self.last_step:.3g}"
        return f"{equal}; near-ties ({step}): {self.near_ties} of {self.differing}"

    def refuse_another_model(self) -> None:
        """Refuse a graph whose labels differ where the trained model is sure of its own.

        Raises:
            StageFailed: it is another model.
        """
        unlike = self.differing - (self.near_ties or 0)
        if unlike > max(1.0, LARGEST_SHARE * self.labels):
            raise StageFailed(
                f"the integer graph gives {self.differing} of {self.labels} labels otherwise than "
                f"the trained model, {unlike} of them no near-ties; expected at most "
                f"{LARGEST_SHARE:.1%} such"
            )
