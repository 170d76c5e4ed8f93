"""Perplexity of language models, over whole samples or windows of a fixed context."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from compress.common.config import Count, Settings
from compress.common.errors import PipelineInvalid
from compress.common.forward import first_output
from compress.core.metrics.metric import Metric
from compress.core.objectives.task import need_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from compress.common.forward import Outputs
    from compress.data.targets import Targets


class SlidingWindow(Settings):
    """Reads samples in windows of `context` tokens, each `stride` tokens after the one before.

    Every token counts once: a window counts those that no earlier one did, and the others are what
    they are predicted from (as in transformers' guide to perplexity).
    """

    context: int = Field(ge=2)
    """Tokens that the model sees in one call."""
    stride: Count
    """Tokens by which a window begins after the one before; less than the context."""

    @model_validator(mode="after")
    def _windows_overlap(self) -> SlidingWindow:
        # The first token of a window has no predecessor there, so it must have counted before.
        if self.stride >= self.context:
            raise ValueError(
                f"stride {self.stride} is not below context {self.context}; windows have to "
                "overlap by a token, as the first of each is predicted from nothing"
            )
        return self

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> SlidingWindow:
        """Return the windows of a metric's arguments; raise PipelineInvalid for others."""
        try:
            return cls(**arguments)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            problem = f"{place}: {first['msg']}" if place else first["msg"]
            raise PipelineInvalid(
                "metric perplexity: arguments take context and stride, two numbers of tokens: "
                f"{problem.replace('Value error, ', '')}"
            ) from None

    def of(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor
    ) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
        """Yield the windows of a batch: inputs, and targets with -100 for those counted before.

        Every input with the targets' length on axis 1 is cut.
        """
        from compress.data.batch import IGNORED_LABEL

        length, counted = targets.shape[1], 0
        for begin in range(0, length, self.stride):
            end = min(begin + self.context, length)
            window = slice(begin, end)
            parts = (x[:, window] if x.shape[1:2] == (length,) else x for x in inputs)
            known = targets[:, window].clone()
            known[:, : counted - begin] = IGNORED_LABEL
            yield tuple(parts), known
            counted = end
            if end == length:
                return


class Perplexity(Metric):
    """The exponential of the mean cross-entropy; with `context` and `stride` over windows."""

    higher = False
    is_exponential = True
    labels = "class"

    @property
    def window(self) -> SlidingWindow | None:
        """The windows that it is measured in; None where samples are read as they are."""
        return SlidingWindow.from_arguments(dict(self.arguments)) if self.arguments else None

    def parts(
        self, inputs: tuple[torch.Tensor, ...], targets: Targets
    ) -> Iterator[tuple[tuple[torch.Tensor, ...], Targets]]:
        """Yield the batch, or its windows."""
        if window := self.window:
            yield from window.of(inputs, need_tensor("metric perplexity", targets))
        else:
            yield inputs, targets

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Add up the cross-entropy of each sample's labels, and count them."""
        targets = need_tensor(f"metric {self.name}", targets)
        name = "nll" if self.loss.name == "nll" else "cross_entropy"
        return replace(self.loss, name=name).sums_and_counts(first_output(outputs), targets)

    def check_settings(self) -> None:
        """Raise PipelineInvalid for arguments that are no windows."""
        if self.direction is not None:
            super().check_settings()
        _ = self.window
