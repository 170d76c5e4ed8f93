"""Building a module without drawing the initial weights, which loading replaces.

Drawing them takes longer than reading a file of them, and a run builds a model some twenty times.
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

from compress.common.process import random_state_kept

if TYPE_CHECKING:
    from compress.artifacts.recipe import Recipe

log = logging.getLogger(__name__)

READ_AROUND_OPERATORS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "untyped_storage")
)
"""Methods that read values without an operator, which a dispatch mode does not see."""
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_drawn: set[tuple[str, str]] = set()  # factories with arguments that need their drawn weights


def build_to_load(recipe: Recipe, folder: Path | None, names: Collection[str]) -> nn.Module:
    """Return a recipe's module whose tensors of these names, in its state dict, have any values.

    All else is as :meth:`Recipe.build` makes it, which builds the module where its other parts
    depend on drawn weights, or are drawn after them. Generators of random numbers stay as they are,
    whichever builds it.
    """
    key = recipe.factory, repr(recipe.arguments)
    if key not in _drawn:
        unset = _UnsetTensors()
        try:
            with random_state_kept("cpu"), unset, _ReadsAroundOperators(unset):
                module = recipe.build(folder)
            obstacle = unset.obstacle or unset.left_by(module, names)
        except Exception as error:  # of a factory or an edit, or of :meth:`_UnsetTensors.stop`
            if not unset.storages:
                raise
            obstacle = unset.obstacle or repr(error)
        if not obstacle:
            return module
        log.info("%s is built with drawn weights: %s", recipe.factory, obstacle)
        _drawn.add(key)
    with random_state_kept("cpu"):
        return recipe.build(folder)


class _UnsetTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves draws out, and follows the tensors that lack values through all other operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, StorageWeakRef] = {}
        """Memory without values, by address, which its reference keeps from being given anew."""
        self.obstacle = ""  # kept, as a factory may catch the exception

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # What a factory draws with a generator of its own it has seeded, and draws again alike.
        is_own = kwargs.get("generator") not in (None, torch.default_generator)
        if torch.Tag.nondeterministic_seeded in func.tags and not is_own:
            if written:
                self._add(written)
                return args[0]
            if self.storages:
                self.stop(func)  # its numbers would be others
        reads_unset = self.hold((args, kwargs))
        returned = [str(value.type) for value in func._schema.returns]
        if reads_unset and (
            DATA_DEPENDENT & {*func.tags} or not all("Tensor" in name for name in returned)
        ):
            self.stop(func)
        result = func(*args, **kwargs)
        if reads_unset:
            self._add((result, written))
        return result

    def _add(self, values: Any) -> None:
        for tensor in _tensors(values):
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self.storages[reference.cdata] = reference

    def hold(self, values: Any) -> bool:
        """Whether a tensor among an operator's arguments lacks values."""
        return bool(self.storages) and any(
            tensor.untyped_storage()._cdata in self.storages for tensor in _tensors(values)
        )

    def stop(self, operator: object) -> None:
        """End the building, as what follows depends on drawn weights."""
        self.obstacle = f"{operator} depends on them"
        raise RuntimeError(self.obstacle)

    def left_by(self, module: nn.Module, names: Collection[str]) -> str:
        """Return why loading these names leaves a tensor without values; empty if it does not."""
        if not self.storages:
            return ""  # nor is a state dict asked for, which a module may make otherwise
        loaded = {
            tensor.untyped_storage()._cdata
            for name, tensor in module.state_dict(keep_vars=True).items()
            if name in names
            and isinstance(tensor, torch.Tensor)
            and tensor.untyped_storage().nbytes() == tensor.nbytes
        }
        is_left = any(
            address not in loaded and not storage.expired()  # type: ignore[no-untyped-call]
            for address, storage in self.storages.items()
        )
        return "a tensor that is not in its state dict depends on them" if is_left else ""


class _ReadsAroundOperators(TorchFunctionMode):
    """Stops what reads tensors without values around operators."""

    def __init__(self, unset: _UnsetTensors) -> None:
        super().__init__()
        self._unset = unset

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_AROUND_OPERATORS and self._unset.hold(args):
            self._unset.stop(func.__name__)
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
