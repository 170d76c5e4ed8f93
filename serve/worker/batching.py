"""Batching: join the rows of several requests for one model call, and split its outputs."""

from __future__ import annotations

import logging
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compress.serve.worker.tensors import Array


def run_batched(
    run: Callable[[Sequence[Array]], Sequence[Array]], requests: Sequence[list[Array]]
) -> list[list[Array] | Exception]:
    """Run requests that differ in size on axis 0 alone as one batch; return outputs or errors."""
    try:
        if len(requests) == 1:
            return [list(run(requests[0]))]
        batch_outputs = run([np.concatenate(column) for column in zip(*requests, strict=True)])
        ends = [0, *accumulate(len(arrays[0]) for arrays in requests)]
        if any(len(output) != ends[-1] for output in batch_outputs):
            raise ValueError("the rows of an answer are not those of the requests")
        return [[output[start:end] for output in batch_outputs] for start, end in pairwise(ends)]
    except Exception as error:
        if len(requests) == 1:
            logging.getLogger(__name__).warning("inference failed", exc_info=True)
            return [error]
    # One request's values (an index out of range …) must not fail the rest of its batch.
    return [run_batched(run, [arrays])[0] for arrays in requests]
