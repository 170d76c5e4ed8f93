"""Requests that run together: their rows are joined for one call, and its answers cut apart."""

from __future__ import annotations

import logging
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serve.worker.tensors import Array


def together(
    run: Callable[[Sequence[Array]], Sequence[Array]], requests: Sequence[list[Array]]
) -> list[list[Array] | Exception]:
    """Return each request's outputs, or what went wrong with it.

    Args:
        run: the model as a function of arrays.
        requests: each one's inputs; several are alike but for axis 0, which counts their rows.
    """
    try:
        if len(requests) == 1:
            return [list(run(requests[0]))]
        joined = run([np.concatenate(column) for column in zip(*requests, strict=True)])
        ends = [0, *accumulate(len(arrays[0]) for arrays in requests)]
        if any(len(output) != ends[-1] for output in joined):
            raise ValueError("the rows of an answer are not those of the requests")
        return [[output[start:end] for output in joined] for start, end in pairwise(ends)]
    except Exception as error:
        if len(requests) == 1:
            logging.getLogger(__name__).warning("inference failed", exc_info=True)
            return [error]
    # One request's values (an index out of range …) must not fail those it was joined with.
    return [together(run, [arrays])[0] for arrays in requests]
