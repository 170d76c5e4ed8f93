"""Arrays of requests: checked against the model's signature, joined for one call, and classified.

A request error is raised as ``ValueError(status, message)``: TorchServe expects exactly one class
in a handler module, so none can be defined for errors.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Named = Mapping[str, Any]  # a JSON object, or values by name
    Specs = Sequence[Named]  # "name", "dtype", "shape" … of each input

UNREADABLE = 400  # the body, or a tensor in it, does not match the signature
NOT_ACCEPTABLE = 406  # the response format that the client accepts cannot represent the outputs
TOO_LARGE = 413
UNKNOWN_FORM = 415  # unsupported Content-Type or Content-Encoding
UNANSWERABLE = 422  # the model fails for these values, or outputs NaN
BROKEN = 500  # the model fails for every input

SHOWN_CHARACTERS = 160  # most characters of a client's value in a message
BRIEF = reprlib.Repr()
BRIEF.maxlist = BRIEF.maxtuple = BRIEF.maxdict = 8
BRIEF.maxstring = BRIEF.maxother = BRIEF.maxlong = 60


def unreadable(message: str) -> ValueError:
    """Return the error of a request whose body, or a tensor in it, does not match the signature."""
    return ValueError(UNREADABLE, message)


def abbreviated(value: Any) -> str:
    """Return the repr of a client's value for a message, shortened."""
    text = BRIEF.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def describe_error(error: Exception, status: int = UNREADABLE) -> tuple[int, str]:
    """Return the HTTP status and the message for an error."""
    if type(error) is ValueError and len(error.args) == 2:
        status, message = error.args
        return status, message
    message = f"{type(error).__name__}: {str(error)[:160]}"
    return status, f"the body cannot be read: {message}" if status == UNREADABLE else message


def output_fault(outputs: Sequence[Array] | Exception, names: Sequence[str]) -> str:
    """Describe what is wrong with a model's outputs; empty if nothing is."""
    if isinstance(outputs, Exception):
        first_line = str(outputs).strip().partition("\n")[0]
        return f"{type(outputs).__name__}: {first_line[:160]}"
    for name, array in zip(names, outputs, strict=True):
        if array.dtype.kind == "f" and np.isnan(array).any():
            return f"it answers NaN in {name}"
    return ""


def inference_error(fault: str, *, works: bool) -> ValueError:
    """Return error 422, about the request, if the model works for other inputs; else error 500."""
    if works:
        return ValueError(UNANSWERABLE, f"the model cannot answer these values: {fault}")
    return ValueError(BROKEN, f"the model does not work any more: {fault}")


def in_signature_order(named: Named, specs: Specs) -> list[Any]:
    """Return the values in the signature's order; refuse missing and unknown names."""
    names = [spec["name"] for spec in specs]
    if sorted(named) != sorted(names):
        raise unreadable(f"the inputs are {abbreviated(sorted(named))}, expected {names}")
    return [named[name] for name in names]


def to_exact_array(values: Any, spec: Named) -> Array:
    """Convert nested lists of numbers to the input's dtype; refuse values that it would change."""
    # Types of the leaves, with `list` among them if the depths differ. Not by numpy, which pads
    # every element to the longest text if there is one among numbers.
    level, types = [values], {type(values)}
    while types == {list}:
        level = list(chain.from_iterable(level))
        types = {*map(type, level)}
    # JSON's booleans are no numbers; 0 and 1 are taken for booleans.
    if not types <= {int, float, *([bool] if spec["dtype"] == "bool" else [])}:
        raise unreadable(f"{spec['name']} holds values that are not {spec['dtype']}")
    try:
        parsed = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise unreadable(f"{spec['name']} is not a tensor: {str(error)[:120]}") from None
    if parsed.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            array = parsed.astype(spec["dtype"])
        if array.dtype.kind == "f" or (array == parsed).all():
            return array
    raise unreadable(f"{spec['name']} holds values that are not {spec['dtype']}")


def check(arrays: list[Array], specs: Specs, max_rows: int) -> None:
    """Raise ValueError for inputs that do not match the signature.

    A spec may have ``not_finite``, which of ``nan`` and ``infinities`` (as float attention masks
    hold) are allowed, ``bounds``, the smallest and largest size of a named axis, and ``rows``:
    those of the table that ids look up.
    """
    sizes: dict[str, int] = {}
    for array, spec in zip(arrays, specs, strict=True):
        name, shape = spec["name"], spec["shape"]
        if array.dtype != spec["dtype"]:
            raise unreadable(f"{name} is {array.dtype}, expected {spec['dtype']}")
        fits = array.size and len(array.shape) == len(shape)
        for wanted, size in zip(shape, array.shape, strict=False):
            fits &= size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        if not fits:
            raise unreadable(f"{name} has shape {list(array.shape)}, expected {list(shape)}")
        for axis, (least, most) in spec.get("bounds", {}).items():
            if not least <= sizes[axis] <= (most or sizes[axis]):
                allowed = f"{least} to {most}" if most else f"{least} or more"
                raise unreadable(f"{name}: {axis} is {sizes[axis]}, expected {allowed}")
        if "rows" in spec and not 0 <= array.min() <= array.max() < spec["rows"]:
            found = array.min() if array.min() < 0 else array.max()
            raise ValueError(
                UNANSWERABLE, f"{name} holds {found}, expected ids from 0 to {spec['rows'] - 1}"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            found = [("NaN", "nan", np.isnan(array)), ("infinity", "infinities", np.isinf(array))]
            for word, taken, places in found:
                if places.any() and taken not in spec.get("not_finite", ()):
                    raise unreadable(f"{name} holds {word}, expected finite numbers")
    rows = sizes.get(next(iter(specs[0]["shape"]), ""), 0)
    if rows > max_rows:
        raise ValueError(TOO_LARGE, f"{rows} rows, at most {max_rows} in one request")


@cache
def dtype_name(dtype: Any) -> str:
    """Return a dtype's name; cached, as numpy takes longer for it than a small response does."""
    return str(dtype)


def top_classes(scores: Array, classes: Named) -> list[list[dict[str, Any]]]:
    """Return the most probable classes of each row of scores (rows, classes), in descending order.

    They are logits if ``classes["softmax"]``, or ``"sigmoid"`` where classes do not exclude each
    other, is true; else probabilities.
    """
    rows = scores.astype(np.float64)
    if classes.get("sigmoid"):
        rows = (1 + np.tanh(rows / 2)) / 2  # without overflow
    if classes["softmax"]:
        powers = np.exp(rows - rows.max(axis=-1, keepdims=True))  # relative, lest exp overflow
        rows = powers / powers.sum(axis=-1, keepdims=True)
    best = np.argsort(-rows, axis=-1, kind="stable")[:, : classes["top"]]
    return [
        [{"label": classes["names"][i], "probability": float(row[i])} for i in places]
        for row, places in zip(rows, best, strict=True)
    ]


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
