"""Probing an artifact for dependence on its batch, with rows of `val` where there is data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from compress.profiling.batch_dependence import (
    ROWS,
    as_arrays,
    as_call,
    measure,
    rounding_of,
    seeded_rows,
)

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.stage import Context
    from compress.data.splits import Splits
    from compress.profiling.batch_dependence import Array, BatchDependence

SPLIT: Literal["val"] = "val"


def batch_dependence(artifact: Artifact, context: Context) -> BatchDependence:
    """Return how far an artifact's answers move with what else is in the batch.

    Args:
        artifact: the model, in any format.
        context: data, device, threads and seed.
    """
    signature, data = artifact.signature, context.data
    rows, alone = seeded_rows(signature, 2 * ROWS, context.seed), list[list["Array"]]()
    has_val = data is not None and SPLIT in data.datasets
    if data is not None and has_val:
        rows, alone = _rows_of_val(data, signature)
    with artifact.open(context.device, context.threads) as predict:
        return measure(
            as_call(predict, signature),
            signature,
            rows,
            source=SPLIT if has_val else "seeded",
            rounding=rounding_of(artifact),
            unpadded=alone,
        )


def _rows_of_val(data: Splits, signature: Signature) -> tuple[list[Array], list[list[Array]]]:
    """Return rows from all over ``val``, and the first of them one by one where they were padded.

    The first of a split are often of one class, and those beside each other of one source.
    """
    samples = len(data.split(SPLIT))  # type: ignore[arg-type]
    first = signature.inputs[0].shape[:1]
    wanted = 2 * first[0] if first and isinstance(first[0], int) else 2 * ROWS
    count = min(wanted, samples)
    order = [i * samples // count for i in range(count)]
    # Every other one is asked, and those between stand beside it.
    order = order[::2] + order[1::2]
    (batch,) = data.read(SPLIT, order, count)
    rows = as_arrays(batch.inputs)
    shapes = [array.shape[1:] for array in rows]
    varying = {*signature.dynamic_axes} - {signature.batch_axis}
    alone = []
    for i in order[:ROWS] if varying else ():
        (single,) = data.read(SPLIT, [i], 1)
        inputs = as_arrays(single.inputs)
        if [array.shape[1:] for array in inputs] != shapes:
            alone.append(inputs)
        else:
            alone.append([])
    return rows, alone
