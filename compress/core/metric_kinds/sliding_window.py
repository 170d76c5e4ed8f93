"""Windows of long samples, by which perplexity is measured with a fixed context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from compress.common.config import Count, Settings
from compress.common.errors import PipelineInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch


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
