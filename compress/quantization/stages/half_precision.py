"""The stage that computes in half precision; settings only, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Count
from compress.core.context import COMPARED_BATCHES, Context
from compress.core.stage import Stage
from compress.quantization.config.calibration_data import Calibration
from compress.quantization.stages.graph_artifact import check_exclude, save_quantized

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compress.data.batch import Batch
    from compress.quantization.mixed_precision.half_graph import PrecisionConverter


class ConvertPrecision(Stage[EagerModel, GraphModel]):
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
    exclude: tuple[str, ...] = ()
    """Names of modules left in float32; `*` and `?` stand for any characters."""

    @property
    def needs_data(self) -> bool:
        """Whether the format's range is narrower than float32's."""
        return self.dtype == "float16"

    @property
    def uses_data(self) -> bool:
        """Always: without data, seeded inputs are looked at."""
        return True

    @property
    def activation_formats(self) -> frozenset[str]:
        """The one asked for."""
        return frozenset({self.dtype})

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        """Look at the numbers, choose, cast, and seal the graph."""
        import torch

        from compress.quantization.mixed_precision.half_graph import (
            PrecisionConverter,
            convert_precision,
        )

        module = model.load()
        check_exclude(self.exclude, module)
        converter = PrecisionConverter(getattr(torch, self.dtype), self.headroom, self.exclude)
        done = 0

        def report(samples: int) -> None:
            nonlocal done
            done += samples
            context.progress("look", done, 2 * self.calibration_samples)

        batches = self._batches(model, context)
        program = convert_precision(module, model.signature, converter, batches, report)
        return save_quantized(
            self, model, program, converter.converted, self._facts(converter), context
        )

    def _batches(self, model: EagerModel, context: Context) -> Iterable[Batch]:
        """Return a sample of the data, or seeded inputs where there is none and none is needed."""
        from compress.data.batch import Batch

        if self.needs_data or context.data is not None:
            return Calibration.of(self.calibration_samples, model.signature, context)
        seeds = range(context.seed, context.seed + COMPARED_BATCHES)
        return [Batch(model.signature.example(seed=seed), None) for seed in seeds]

    def _facts(self, converter: PrecisionConverter) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "float32_operators": dict(sorted(converter.sensitive.items())),
            "float32_for_their_numbers": converter.misfits,
        }
