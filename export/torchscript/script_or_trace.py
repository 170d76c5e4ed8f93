"""Find the submodules that branch or loop by the data, and script only those."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = "the model's own forward"


def script_parts_(
    module: torch.nn.Module, patterns: Sequence[str], trace: Callable[[], Any]
) -> None:
    """Replace submodules by scripted ones, in place.

    They are those whose names match the patterns, or without any those in which `trace` guesses.

    Raises:
        StageFailed: a name fits no submodule, one cannot be scripted, or all would have to be.
    """
    if patterns:
        names = [name for name, _ in module.named_modules() if name]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise StageFailed(f"scripted: no submodule is named {pattern!r}")
        names = [n for n in names if any(fnmatchcase(n, p) for p in patterns)]
    else:
        with record_guesses(module) as names:
            trace()
        if ROOT in names:
            raise StageFailed(
                f"{ROOT} branches or counts by the data, and no part of it; use `method: script`, "
                "or put that into a submodule"
            )
    # A scripted module takes those inside it along.
    for name in sorted(set(names)):
        if any(name.startswith(f"{outer}.") for outer in names):
            continue
        try:
            scripted = torch.jit.script(module.get_submodule(name))
        except Exception as error:
            raise StageFailed(
                f"torch.jit.script cannot express {name}: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, scripted)


@contextmanager
def record_guesses(module: torch.nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules that convert a tensor to a number while they are traced.

    The trace fixes the number, or the branch taken, whatever the data of later calls is.
    """
    # torch's warning does not name the module, so hooks record which one runs.
    names = {part: name or ROOT for name, part in module.named_modules()}
    running: list[str] = []
    guessing: list[str] = []

    def enter(part: torch.nn.Module, _: Any) -> None:
        running.append(names.get(part, running[-1] if running else ROOT))

    def leave(_: torch.nn.Module, __: Any, ___: Any) -> None:
        running.pop()

    def record(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, torch.jit._trace.TracerWarning):
            showwarning(message, category, *place, **more)
        elif (running or [ROOT])[-1] not in guessing:
            guessing.append((running or [ROOT])[-1])

    handles = []
    showwarning = warnings.showwarning
    unhookable = {  # scripted parts, and torch's integer layers
        inner
        for part in module.modules()
        if isinstance(part, torch.jit.ScriptModule)
        or type(part).__module__.startswith("torch.ao.nn.")
        for inner in part.modules()
    }
    for part in module.modules():
        if part in unhookable:
            continue
        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", torch.jit._trace.TracerWarning)
            warnings.showwarning = record
            yield guessing
    finally:
        for handle in handles:
            handle.remove()
