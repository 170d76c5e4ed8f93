"""Reads files that torch.save wrote: tensors and plain containers, and nothing is ever executed."""

from __future__ import annotations

import logging
import pickle
import re
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from compress.checkpoint.safe_zip import refuse_bomb
from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

RUNS_PROGRAMS = re.compile(
    r"(os|posix|nt|sys|subprocess|commands|pty|runpy|importlib|ctypes)\..*"
    r"|builtins\.(eval|exec|compile|open|__import__|breakpoint)"
)
"""Functions that no training stores. They would not be called either, but a file that names them is
not worth reading."""
NAMES_CODE = re.compile(r"unsupported (global|class)|allowlist", re.IGNORECASE)
"""In torch's (2.13) error for a pickle that names anything but tensors and plain containers."""
ADVICE = "save the weights alone with torch.save(model.state_dict(), …) or as .safetensors"


class _PlaceholderType(type):
    # torch's reader (2.13) sets items of dict itself only, and compares the types with ==. So the
    # items of a pickled subclass of dict are dropped like any other content of a placeholder.
    def __eq__(cls, other: object) -> bool:
        return cls is other or other is dict

    __hash__ = type.__hash__


class _Placeholder(metaclass=_PlaceholderType):
    """Stands for an object of a class that is not loaded; ignores what the pickle gives it."""

    def __init__(self, *args: object, **keywords: object) -> None: ...
    def __new__(cls, *args: object, **keywords: object) -> _Placeholder:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...


def read_pickle(file: Path) -> dict[Any, Any]:
    """Return the dictionary of a file, its tensors mapped into memory and read when they are used.

    Objects of other classes become placeholders: nothing of them is imported or called. Raises
    ArtifactInvalid for a file that is unreadable, no dictionary, or names functions that run
    programs.
    """
    refuse_bomb(file)
    names: list[str] = []
    mapped = False
    try:
        with file.open("rb") as stream:
            is_zip = stream.read(4) == b"PK\3\4"  # else of torch before 1.6
        if is_zip:
            names = sorted(get_unsafe_globals_in_checkpoint(file))
            with zipfile.ZipFile(file) as archive:  # torch would map compressed bytes as tensors
                mapped = all(m.compress_type == zipfile.ZIP_STORED for m in archive.infolist())
        planted = next((name for name in names if RUNS_PROGRAMS.fullmatch(name)), None)
        if planted:
            raise ArtifactInvalid(
                f"checkpoint {file}: names {planted} in pickled code, which is never executed "
                f"here; {ADVICE}"
            )
        placeholders: list[Any] = [(type(name, (_Placeholder,), {}), name) for name in names]
        with safe_globals(placeholders):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except ArtifactInvalid:
        raise
    except Exception as error:  # for bytes that are no pickle, torch's reader raises anything
        # Without torch's advice, which comes first, to load the file with weights_only=False.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        is_code = isinstance(error, pickle.UnpicklingError) and NAMES_CODE.search(str(error))
        if names or is_code:
            raise ArtifactInvalid(
                f"checkpoint {file}: holds pickled code{_of(names)}, which is never executed here, "
                f"and cannot be read without it ({reason}); {ADVICE}"
            ) from error
        raise ArtifactInvalid(
            f"checkpoint {file}: is no file that torch.save wrote, or truncated "
            f"({type(error).__name__}: {reason})"
        ) from error
    if not isinstance(state, dict):
        raise ArtifactInvalid(
            f"checkpoint {file}: holds a {type(state).__name__}, expected a state_dict; {ADVICE}"
        )
    if names:
        log.debug("checkpoint %s: objects%s are skipped", file, _of(names))
    return state


def _of(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" of {', '.join(names[:3])}{more}" if names else ""
