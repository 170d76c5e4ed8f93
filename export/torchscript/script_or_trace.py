"""What a trace would guess: which modules branch or count by the data, and scripting only those."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WHOLE = "the model's own forward"


def script_parts_(
    module: torch.nn.Module, patterns: Sequence[str], trace: Callable[[], Any]
) -> None:
    """Replace submodules by scripted ones, in place.

    Args:
        module: the whole.
        patterns: their names, `*` and `?` standing for any characters; where there are none, they
            are those that guess while ``trace`` runs.
        trace: records a forward pass of the whole.

    Raises:
        StageFailed: a name fits no submodule, one cannot be scripted, or all would have to be.
    """
    names = _named(module, patterns) if patterns else _guessing(module, trace)
    for name in names:
        try:
            scripted = torch.jit.script(module.get_submodule(name))
        except Exception as error:
            raise StageFailed(
                f"torch.jit.script cannot express {name}: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, scripted)


def _named(module: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise StageFailed(f"scripted: no submodule is named {pattern!r}")
    return _outermost(n for n in names if any(fnmatchcase(n, p) for p in patterns))


def _guessing(module: torch.nn.Module, trace: Callable[[], Any]) -> list[str]:
    with guesses(module) as found:
        trace()
    if WHOLE in found:
        raise StageFailed(
            f"{WHOLE} branches or counts by the data, and no part of it; use `method: script`, or "
            "put that into a submodule"
        )
    return _outermost(found)


def _outermost(names: Any) -> list[str]:
    """Return names without those of modules inside others."""
    kept: list[str] = []
    for name in sorted(set(names)):
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return kept


def _without_hooks(module: torch.nn.Module) -> set[torch.nn.Module]:
    """Return what guesses nothing and takes no hooks: scripted parts, torch's integer layers."""
    return {
        inner
        for part in module.modules()
        if isinstance(part, torch.jit.ScriptModule)
        or type(part).__module__.startswith("torch.ao.nn.")
        for inner in part.modules()
    }


@contextmanager
def guesses(module: torch.nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules that make a number of a tensor while they are traced.

    The trace keeps the number, or the branch taken, whatever the data of later calls is.
    """
    names = {part: name or WHOLE for name, part in module.named_modules()}
    running: list[str] = []
    found: list[str] = []

    def enter(part: torch.nn.Module, _: Any) -> None:
        running.append(names.get(part, running[-1] if running else WHOLE))

    def leave(_: torch.nn.Module, __: Any, ___: Any) -> None:
        running.pop()

    def note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, torch.jit._trace.TracerWarning):
            shown(message, category, *place, **more)
        elif (running or [WHOLE])[-1] not in found:
            found.append((running or [WHOLE])[-1])

    handles = []
    shown = warnings.showwarning
    deaf = _without_hooks(module)
    for part in module.modules():
        if part in deaf:
            continue
        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", torch.jit._trace.TracerWarning)
            warnings.showwarning = note
            yield found
    finally:
        for handle in handles:
            handle.remove()
