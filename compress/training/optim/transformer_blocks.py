"""The parts of a model that are sharded, or computed again, one at a time."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from compress.artifacts.edits.block_removal import alike_entries
from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called."""


def named_blocks(module: nn.Module, classes: Sequence[str], setting: str) -> list[nn.Module]:
    """Return the submodules of the named classes, the inner ones first.

    Raises:
        StageFailed: no submodule has one of the names.
    """
    present = {type(part).__name__ for part in module.modules()}
    for name in classes:
        if name not in present:
            near = difflib.get_close_matches(name, sorted(present), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(present))}"
            raise StageFailed(f"{setting}: the model has no module of class {name!r}; {hint}")
    found = [part for part in module.modules() if type(part).__name__ in classes]
    return [part for part in reversed(found) if part is not module]


def large_blocks(module: nn.Module, parameters: int) -> list[nn.Module]:
    """Return submodules that hold so many weights beyond those of inner ones found, inner first.

    Attention modules of torch stay whole, because they use the weights of parts they do not call;
    so does whatever holds a weight that is used outside of it too.
    """
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    found: list[nn.Module] = []

    def visit(part: nn.Module) -> int:
        """Return how many weights of a part are in none of the found ones."""
        whole = isinstance(part, nn.MultiheadAttention)
        own = sum(p.numel() for p in part.parameters(recurse=whole))
        loose = own if whole else own + sum(visit(child) for child in part.children())
        called = part is not module and not isinstance(part, CONTAINERS)
        if loose < parameters or not called or _is_tied(part, uses):
            return loose
        found.append(part)
        return 0

    visit(module)
    return found


def chosen_blocks(module: nn.Module, classes: Sequence[str], setting: str) -> list[nn.Module]:
    """Return the submodules of the named classes, or the repeated ones, outer and first ones first.

    Raises:
        StageFailed: there are none.
    """
    if classes:
        return list(reversed(named_blocks(module, classes, "activation_blocks")))
    return repeated_blocks(
        module,
        f"{setting}: the model has no repeated blocks; name their classes in activation_blocks",
    )


def repeated_blocks(module: nn.Module, mend: str) -> list[nn.Module]:
    """Return the outermost repeated parts: children of one list or sequence, of one class.

    Args:
        module: the whole.
        mend: what to say where there are none.

    Raises:
        StageFailed: there are none.
    """
    found: list[nn.Module] = []

    def visit(part: nn.Module) -> None:
        alike = set(map(id, alike_entries(part).values()))
        for child in part.children():
            if id(child) in alike:
                found.append(child)
            else:
                visit(child)

    visit(module)
    if not found:
        raise StageFailed(mend)
    return found


def _is_tied(part: nn.Module, uses: Counter[int]) -> bool:
    inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
    return any(uses[key] != count for key, count in inside.items())
