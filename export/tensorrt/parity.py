"""Compare an engine with its source at the sizes that it was built for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch
from export.parity.compare import check_axis_sizes, on_cpu
from export.parity.sample_parity import check_on_samples, val_inputs
from export.parity.tolerance import QUANTIZED, tolerance_for
from export.tensorrt.shape_profiles import with_fixed_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context


def check_engine(
    source: Artifact, engine: Predictor, sizes: Mapping[str, Sequence[int]], context: Context
) -> None:
    """Compare an engine with its source at its smallest, usual and largest sizes, and on `val`.

    Raises:
        StageFailed: their outputs differ; the message says at which sizes.
    """
    signature, engine = source.signature, on_cpu(engine)
    # An ONNX source may be quantized as well.
    quantized = bool(source.manifest.facts.get("integer_kernels"))
    tolerance = QUANTIZED if quantized else tolerance_for(source)
    with source.open(threads=context.threads) as expected:
        for profile in dict.fromkeys(zip(*sizes.values(), strict=True) if sizes else [()]):
            at = dict(zip(sizes, profile, strict=True))
            try:
                check_axis_sizes(expected, engine, with_fixed_sizes(signature, at), tolerance)
            except StageFailed as error:
                raise StageFailed(f"at {at}: {error}" if at else str(error)) from error
        predictors = accept_any_batch(expected, signature), accept_any_batch(engine, signature)
        check_on_samples(*predictors, val_inputs(context), tolerance)
