"""HTTP status codes of request errors, for TorchServe and the built-in server.

A request error is raised as ``ValueError(status, message)``: TorchServe expects exactly one class
in a handler module, so none can be defined for errors.
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
"""The body, or a tensor in it, does not match the signature."""
NOT_ACCEPTABLE = 406
"""The response format that the client accepts cannot represent the outputs."""
TOO_LARGE = 413
UNKNOWN_FORM = 415
"""Unsupported Content-Type or Content-Encoding."""
UNANSWERABLE = 422
"""The model fails for these values, or outputs NaN."""
BROKEN = 500
"""The model fails for every input."""

SHOWN_CHARACTERS = 160
"""Most characters of a client's value in a message."""
BRIEF = reprlib.Repr()
BRIEF.maxlist = BRIEF.maxtuple = BRIEF.maxdict = 8
BRIEF.maxstring = BRIEF.maxother = BRIEF.maxlong = 60


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
