"""Which status tells a client of which mistake: one table, for both servers.

A refusal is ``ValueError(status, message)``, as TorchServe wants exactly one class in a handler.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

UNREADABLE = 400
"""The body, or a tensor in it, is not what the signature says."""
NOT_ACCEPTABLE = 406
"""The form that is asked for cannot carry the answer."""
TOO_LARGE = 413
UNKNOWN_FORM = 415
"""Content-Type or Content-Encoding."""
UNANSWERABLE = 422
"""The model cannot compute with these values, or answers them with NaN."""
BROKEN = 500
"""The model answers nothing any more."""

SHOWN = 160
"""Characters of a client's value that a message shows at most."""
BRIEF = reprlib.Repr()
BRIEF.maxlist = BRIEF.maxtuple = BRIEF.maxdict = 8
BRIEF.maxstring = BRIEF.maxother = BRIEF.maxlong = 60


def shown(value: Any) -> str:
    """Return a value as a message shows it: short, however large it is."""
    text = BRIEF.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def describe_error(error: Exception, status: int = UNREADABLE) -> tuple[int, str]:
    """Return the status and message that tell a client of an error."""
    if type(error) is ValueError and len(error.args) == 2:
        status, message = error.args
        return status, message
    message = f"{type(error).__name__}: {str(error)[:160]}"
    return status, f"the body cannot be read: {message}" if status == UNREADABLE else message


def what_failed(outputs: Sequence[Array] | Exception, names: Sequence[str]) -> str:
    """Return what is wrong with a model's outputs, or nothing."""
    if isinstance(outputs, Exception):
        first = str(outputs).strip().partition("\n")[0]
        return f"{type(outputs).__name__}: {first[:160]}"
    for name, array in zip(names, outputs, strict=True):
        if array.dtype.kind == "f" and np.isnan(array).any():
            return f"it answers NaN in {name}"
    return ""


def blame(what: str, *, works: bool) -> ValueError:
    """Return whose fault a failure is: the request's, where the model still answers another."""
    if works:
        return ValueError(UNANSWERABLE, f"the model cannot answer these values: {what}")
    return ValueError(BROKEN, f"the model does not work any more: {what}")
