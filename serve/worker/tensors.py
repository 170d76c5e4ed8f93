"""Arrays as the signature wants them: values, order, sizes; and the likeliest classes of a row."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.worker.http_errors import TOO_LARGE, UNREADABLE, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Named = Mapping[str, Any]
    Specs = Sequence[Named]

NUMBERS = {bool, int, float}


def in_order(named: Named, specs: Specs) -> list[Any]:
    """Return what is given by name in the signature's order."""
    names = [spec["name"] for spec in specs]
    if sorted(named) != sorted(names):
        raise ValueError(UNREADABLE, f"the inputs are {shown(sorted(named))}, expected {names}")
    return [named[name] for name in names]


def exact(values: Any, spec: Named) -> Array:
    """Return nested lists of numbers as an array of the input's type, none of them changed."""
    if not leaf_types(values) <= NUMBERS:
        raise ValueError(UNREADABLE, f"{spec['name']} holds values that are not {spec['dtype']}")
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ValueError(UNREADABLE, f"{spec['name']} is no tensor: {str(error)[:120]}") from None
    if found.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            array = found.astype(spec["dtype"])
        if array.dtype.kind == "f" or (array == found).all():
            return array
    raise ValueError(UNREADABLE, f"{spec['name']} holds values that are not {spec['dtype']}")


def leaf_types(values: Any) -> set[type]:
    """Return the types of what nested lists hold; ``list`` too where some are nested deeper.

    numpy is not asked: of a long text among numbers it makes an array of texts as long as that.
    """
    level, types = [values], {type(values)}
    while types == {list}:
        level = list(chain.from_iterable(level))
        types = {*map(type, level)}
    return types


def check(arrays: list[Array], specs: Specs, max_rows: int) -> None:
    """Raise ValueError for inputs that the signature does not allow.

    A spec may say ``infinities``: that the model is meant to be given them, as masks have; and
    ``bounds``: the smallest and largest size of a named axis.
    """
    sizes: dict[str, int] = {}
    for array, spec in zip(arrays, specs, strict=True):
        name, shape = spec["name"], spec["shape"]
        if array.dtype != spec["dtype"]:
            raise ValueError(UNREADABLE, f"{name} is {array.dtype}, expected {spec['dtype']}")
        fits = array.size and len(array.shape) == len(shape)
        for wanted, size in zip(shape, array.shape, strict=False):
            fits &= size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        if not fits:
            raise ValueError(
                UNREADABLE, f"{name} has shape {list(array.shape)}, expected {list(shape)}"
            )
        for axis, (least, most) in spec.get("bounds", {}).items():
            if not least <= sizes[axis] <= (most or sizes[axis]):
                allowed = f"{least} to {most}" if most else f"{least} or more"
                raise ValueError(UNREADABLE, f"{name}: {axis} is {sizes[axis]}, expected {allowed}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            found = "NaN" if np.isnan(array).any() else "infinity"
            if found == "NaN" or not spec.get("infinities"):
                raise ValueError(UNREADABLE, f"{name} holds {found}, expected finite numbers")
    rows = sizes.get(next(iter(specs[0]["shape"]), ""), 0)
    if rows > max_rows:
        raise ValueError(TOO_LARGE, f"{rows} rows, at most {max_rows} in one request")


def likeliest(scores: Array, classes: Named) -> list[list[dict[str, Any]]]:
    """Return the likeliest classes of each row, the likeliest first.

    Args:
        scores: (rows, classes): logits, or probabilities where ``classes`` does not say softmax.
        classes: ``names``, ``top`` and ``softmax``.
    """
    rows = scores.astype(np.float64)
    if classes["softmax"]:
        powers = np.exp(rows - rows.max(axis=-1, keepdims=True))
        rows = powers / powers.sum(axis=-1, keepdims=True)
    best = np.argsort(-rows, axis=-1, kind="stable")[:, : classes["top"]]
    return [
        [{"label": classes["names"][i], "probability": float(row[i])} for i in places]
        for row, places in zip(rows, best, strict=True)
    ]
