"""Whether an engine answers like its source at the sizes that it was built for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch
from export.common.device_predictor import on_cpu
from export.parity.compare import check_agreement
from export.parity.sample_parity import check_on_samples, val_inputs
from export.tensorrt.shape_profiles import fixed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context

logger = logging.getLogger(__name__)


def prove_equal(
    source: Artifact, got: Predictor, sizes: Mapping[str, Sequence[int]], context: Context
) -> None:
    """Compare an engine with its source at its smallest, usual and largest sizes, and on `val`.

    Raises:
        StageFailed: they answer otherwise; the message says at which sizes.
    """
    signature, answer = source.signature, on_cpu(got)
    rounded = isinstance(source, GraphModel) or bool(source.manifest.facts.get("integer_kernels"))
    with source.open(threads=context.threads) as expected:
        for chosen in dict.fromkeys(zip(*sizes.values(), strict=True) if sizes else [()]):
            at = dict(zip(sizes, chosen, strict=True))
            try:
                check_agreement(expected, answer, fixed(signature, at), rounded=rounded)
            except StageFailed as error:
                raise StageFailed(f"at {at}: {error}" if at else str(error)) from error
        found = check_on_samples(
            accept_any_batch(expected, signature),
            accept_any_batch(answer, signature),
            val_inputs(context),
            rounded=rounded,
        )
    if found.samples:
        logger.info(
            "on %d samples of `val` answers differ by %.2g of their spread, %d labels clearly",
            *(found.samples, found.relative_error, found.changed),
        )
