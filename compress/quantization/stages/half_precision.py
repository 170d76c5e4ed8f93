"""The stage that computes in half precision; settings only, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from compress.common.config import Count
from compress.core.context import COMPARED_BATCHES, Context
from compress.quantization.stages.base import QuantizationStage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.data.batch import Batch


class ConvertPrecision(QuantizationStage):
    """Hold weights and compute in 16-bit floats; what these cannot hold stays float32.

    Inputs and outputs keep their types. Normalisations, softmax, exponentials and sums stay
    float32, and so does every operator whose numbers overflow or vanish on a sample of the data.
    """

    stage: Literal["convert_precision"] = "convert_precision"
    dtype: Literal["float16", "bfloat16"]
    """`float16` has more digits and ends at 65504; `bfloat16` has float32's range."""
    calibration_samples: Count = 128
    """Samples on which every number's size is looked at; `float16` needs data for it."""
    headroom: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """How many times larger than on the sample numbers may become before the format ends."""

    @property
    def needs_data(self) -> bool:
        """Whether the format's range is narrower than float32's."""
        return self.dtype == "float16"

    @property
    def activation_formats(self) -> frozenset[str]:
        """The half-precision type."""
        return frozenset({self.dtype})

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        """Measure the range of every tensor, choose the operators, cast, and save the graph."""
        import torch

        from compress.quantization.mixed_precision.half_graph import (
            PrecisionConverter,
            convert_precision,
        )

        module = self.load_float(model)
        converter = PrecisionConverter(getattr(torch, self.dtype), self.headroom, self.exclude)
        done = 0

        def report(samples: int) -> None:
            nonlocal done
            done += samples
            # Twice: the float graph is measured, then the converted one is checked.
            context.progress("look", done, 2 * self.calibration_samples)

        batches = self._batches(model, context)
        program = convert_precision(module, model.signature, converter, batches, report)
        facts = {
            "dtype": self.dtype,
            "float32_operators": dict(sorted(converter.sensitive.items())),
            "float32_for_their_numbers": converter.out_of_range,
        }
        return self.save_graph(model, program, converter.converted, facts, context)

    def _batches(self, model: EagerModel, context: Context) -> Iterable[Batch]:
        """Return a sample of the data, or seeded inputs where there is none and none is needed."""
        from compress.data.batch import Batch

        if self.needs_data or context.data is not None:
            return self.calibration_data(model, context)
        seeds = range(context.seed, context.seed + COMPARED_BATCHES)
        return [Batch(model.signature.example(seed=seed), None) for seed in seeds]
