"""Building a module without drawing the initial weights, which loading replaces.

Drawing them takes longer than reading a file of them: 0.7 s for a BERT-base, which a run builds
some twenty times.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compress.common.errors import ArtifactInvalid
from compress.common.process import random_state_kept

if TYPE_CHECKING:
    from compress.artifacts.recipe import Recipe

log = logging.getLogger(__name__)

READ_AROUND_OPERATORS = frozenset(
    (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)
)
"""Methods that read values without an operator, which a dispatch mode does not see."""
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_drawn: set[tuple[str, str]] = set()  # factories with arguments that need their drawn weights


def build_to_load(recipe: Recipe, folder: Path | None, names: Collection[str]) -> nn.Module:
    """Return a recipe's module whose tensors of these names, in its state dict, have any values.

    All else is as :meth:`Recipe.build` makes it, which builds the module where its other parts
    depend on drawn weights, or are drawn after them.
    """
    key = recipe.factory, repr(recipe.arguments)
    if key in _drawn:
        return _build_as_it_is(recipe, folder)
    unset = _UnsetStorages()
    try:
        # Whichever way it is built, what is drawn after it is the same.
        with random_state_kept("cpu"), _UnsetOperators(unset), _UnsetReads(unset):
            module = recipe.build(folder)
        obstacle: object = unset.obstacle or unset.obstacle_in(module, names)
    except (ArtifactInvalid, _ReadsUnset) as error:
        if not unset.were_any:
            raise
        obstacle = error
    if not obstacle:
        return module
    log.info("%s is built with drawn weights: %s", recipe.factory, obstacle)
    _drawn.add(key)
    return _build_as_it_is(recipe, folder)


def _build_as_it_is(recipe: Recipe, folder: Path | None) -> nn.Module:
    with random_state_kept("cpu"):
        return recipe.build(folder)


class _ReadsUnset(Exception):
    """Values are read that were not drawn."""


class _UnsetStorages:
    """Memory of tensors that were to be filled with random numbers, and of all computed of them."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self.obstacle = ""  # kept, as the factory may catch the exception

    @property
    def were_any(self) -> bool:
        """Whether a draw was left out."""
        return bool(self._storages)

    def add(self, values: Any) -> None:
        """Add the tensors among an operator's results."""
        for tensor in _tensors(values):
            # The weak reference keeps the address of a freed storage from being given to another.
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._storages[reference.cdata] = reference

    def hold(self, values: Any) -> bool:
        """Whether a tensor among an operator's arguments has no values yet."""
        return self.were_any and any(
            tensor.untyped_storage()._cdata in self._storages for tensor in _tensors(values)
        )

    def stop(self, what: object) -> None:
        """End the building, as what follows depends on drawn weights."""
        self.obstacle = f"building it calls {what} on or after them"
        raise _ReadsUnset(self.obstacle)

    def obstacle_in(self, module: nn.Module, names: Collection[str]) -> str:
        """Describe a tensor without values that loading these names leaves so; empty if none."""
        loaded = {
            tensor.untyped_storage()._cdata
            for name, tensor in module.state_dict(keep_vars=True).items()
            if name in names
            and isinstance(tensor, torch.Tensor)
            and tensor.untyped_storage().nbytes() == tensor.nbytes
        }
        alive = {cdata for cdata, storage in self._storages.items() if not storage.expired()}  # type: ignore[no-untyped-call]
        return "a tensor that is not in its state dict is computed from them" * bool(alive - loaded)


class _UnsetOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out draws, and follows tensors without values through all other operators."""

    def __init__(self, unset: _UnsetStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unset = unset

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            arguments = func._schema.arguments
            if arguments[0].alias_info is not None and arguments[0].alias_info.is_write:
                self._unset.add(args[0])
                return args[0]
            if self._unset.were_any:
                self._unset.stop(func)  # the numbers would be others
        elif self._unset.hold((args, kwargs)):
            returns_tensors = all("Tensor" in str(value.type) for value in func._schema.returns)
            if not returns_tensors or DATA_DEPENDENT & {*func.tags}:
                self._unset.stop(func)
            result = func(*args, **kwargs)
            self._unset.add(result)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._unset.add(value)
            return result
        return func(*args, **kwargs)


class _UnsetReads(TorchFunctionMode):
    """Finds what reads values around operators."""

    def __init__(self, unset: _UnsetStorages) -> None:
        super().__init__()
        self._unset = unset

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_AROUND_OPERATORS and self._unset.hold(args):
            self._unset.stop(func.__name__)
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
