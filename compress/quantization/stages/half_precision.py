"""The stage that computes in half precision; settings only, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from compress.common.lazy_modules import torch
from compress.core.context import COMPARED_BATCHES, Context
from compress.quantization.stages.base import QuantizationStage

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel


class ConvertPrecision(QuantizationStage):
    """Hold weights and compute in 16-bit floats; what these cannot hold stays float32.

    Inputs and outputs keep their types. Normalisations, softmax, exponentials and sums stay
    float32, and so does every operator whose numbers overflow or vanish on a sample of the data.
    For GPUs, and for half the file where integers cost too much accuracy.

        - stage: convert_precision
          dtype: float16
          headroom: 4
    """

    stage: Literal["convert_precision"] = "convert_precision"
    default_samples: ClassVar[int] = 128
    dtype: Literal["float16", "bfloat16"]
    """`float16` has more digits and ends at 65504, so that it needs data on which every number's
    size is looked at; `bfloat16` has float32's range."""
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

    def run(self, model: EagerModel | GraphModel, context: Context) -> GraphModel:
        """Measure the range of every tensor, choose the operators, cast, and save the graph."""
        from compress.data.batch import Batch
        from compress.quantization.mixed_precision.half_graph import (
            PrecisionConverter,
            convert_precision,
        )

        module = self.load_float(model)
        converter = PrecisionConverter(getattr(torch, self.dtype), self.headroom, self.exclude)

        def report(samples: int) -> None:
            # Twice: the float graph is measured, then the converted one is checked.
            context.progress("look", samples, 2 * self.drawn_samples)

        batches: Iterable[Batch]
        if self.needs_data or context.data is not None:
            batches = self.calibration_data(model, context)
        else:  # bfloat16 has the range of float32: seeded inputs do
            seeds = range(context.seed, context.seed + COMPARED_BATCHES)
            batches = [Batch(model.signature.example(seed=seed), None) for seed in seeds]
        program = convert_precision(module, model.signature, converter, batches, report)
        del module  # its weights, as the model is loaded anew to be compared
        facts = {
            "dtype": self.dtype,
            "float32_operators": dict(sorted(converter.sensitive.items())),
            "float32_for_their_numbers": converter.out_of_range,
        }
        return self.save_graph(model, program, converter.converted, facts, context)
