"""Stages that quantize; settings only, torch is imported when they run."""

from __future__ import annotations

import logging
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from compress.core.eager import EagerModel
from compress.core.errors import PipelineInvalid, StageFailed
from compress.core.graph import GraphModel
from compress.core.stage import Context, Stage
from compress.quantization.scheme import SCHEMES, Observer, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from compress.core.data import Batch
    from compress.core.signature import Signature

logger = logging.getLogger(__name__)


class QuantizeStatic(Stage[EagerModel, GraphModel]):
    """Compute in 8-bit integers, activation ranges fixed beforehand on a sample of the data."""

    stage: Literal["quantize_static"] = "quantize_static"
    target: Target = "onnxruntime-cpu"
    """Runtime whose fused integer kernels decide which operators are quantized, and how."""
    calibration_samples: Annotated[int, Field(gt=0)] = 512
    """Samples on which the ranges of activations are observed."""
    observer: Observer = "minmax"
    """How a range is estimated: extremes, moving average of extremes, or least squared error."""
    exclude: tuple[str, ...] = ()
    """Names of modules left in float; `*` and `?` stand for any characters."""

    @property
    def needs_data(self) -> bool:
        """Always."""
        return True

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        """Calibrate, round, and seal the integer graph."""
        from compress.quantization.calibrate import quantize
        from compress.quantization.quantizer import OnnxRuntimeQuantizer

        module = model.load()
        _check_exclude(self.exclude, module)
        quantizer = OnnxRuntimeQuantizer(SCHEMES[self.target], self.observer, self.exclude)

        def report(seen: int) -> None:
            context.progress("calibrate", seen, self.calibration_samples)

        batches = _calibration_batches(self.calibration_samples, model.signature, context)
        program = quantize(module, model.signature, quantizer, batches, report)
        quantized, kept_float = dict(sorted(quantizer.quantized.items())), quantizer.float_modules
        logger.info("%s: quantized %s; float: %s", self.title, quantized, kept_float or "none")
        return GraphModel.create(
            context.root,
            program,
            model.signature,
            lineage=self.lineage(model),
            facts={"quantized_operators": quantized, "float_modules": kept_float},
        )


def _calibration_batches(samples: int, signature: Signature, context: Context) -> Iterator[Batch]:
    """Return the calibration batches, in the model's batch size where that is fixed."""
    data = context.need_data("calibration")
    if signature.batch_axis is None and signature.inputs[0].shape:
        fixed = int(signature.inputs[0].shape[0])
        if samples % fixed:
            raise StageFailed(
                f"calibration_samples is {samples} and the model takes batches of {fixed}; "
                "make it a multiple"
            )
        data = replace(data, batch_size=fixed)
    return data.calibration(samples, context.seed)


def _check_exclude(patterns: tuple[str, ...], module: torch.nn.Module) -> None:
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, n=1, cutoff=0)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PipelineInvalid(f"exclude: no module is named {pattern!r}{hint}")
