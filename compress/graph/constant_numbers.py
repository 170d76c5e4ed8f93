"""Numbers that a model's code reads of its weights and buffers, such as ``self.shift.item()``."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
IN_PLACE = {"__setitem__", *(f"__i{operator}__" for operator in OPERATORS.split())}
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__"}


class ConstantNumbers(TorchFunctionMode):
    """Within a block, lets a trace read numbers that follow from a module's own tensors alone.

    torch.export takes such a number for one that the data decide: the graph then holds Python's
    functions of it, which no exporter knows, or the trace fails where sizes or branches follow.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.count = 0
        """Numbers that were read."""
        self._module = module
        self._own = {name: x.detach() for name, x in _tensors(module)}
        # The traced tensors are kept, so that no other one gets their identity.
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; of tensors whose values are known, compute or read the values, too."""
        leaves = tree_leaves((args, kwargs := kwargs or {}))
        name, value, changed = getattr(func, "__name__", ""), None, []
        if name in IN_PLACE or "out" in kwargs or re.search(r"[^_]_$", name):
            changed = [kwargs.get("out", args[0] if args else None)]
        is_called = not (changed or name in READS)
        result = func(*args, **kwargs) if is_called else None
        made = tree_leaves(result)
        if is_called and not any(isinstance(x, torch.Tensor) for x in made):
            return result  # such as a stride, of which there are many: no value follows
        values = {id(x): self._value(x) for x in leaves if isinstance(x, torch.Tensor)}
        is_known = bool(values) and None not in values.values()
        if changed:
            if values.get(id(changed[0])) is not None:  # and perhaps its views
                self._own, self._values = {}, {k: (x, None) for k, (x, _) in self._values.items()}
        elif is_known and not any(isinstance(x, SYMBOLS) for x in leaves):
            known = tree_map(lambda x: values.get(id(x), x), (tuple(args), kwargs))
            with suppress(Exception), _disable_current_modes():
                value = func(*known[0], **known[1])
            if name in READS and value is not None:
                self.count += 1
                return value
        if not is_called:
            made = tree_leaves(result := func(*args, **kwargs))
        computed = tree_leaves(value)
        if len(made) != len(computed) or value is None:
            computed = [None] * len(made)
        for x, number in [*zip(made, computed, strict=True), *((x, None) for x in changed)]:
            if isinstance(x, torch.Tensor):
                self._values[id(x)] = x, number
        return result

    def _value(self, traced: torch.Tensor) -> torch.Tensor | None:
        if id(traced) not in self._values:
            # While it is traced, the module has other tensors in place of its own.
            for name, x in _tensors(self._module):
                self._values.setdefault(id(x), (x, self._own.get(name)))
        return self._values.get(id(traced), (traced, None))[1]


def _tensors(module: nn.Module) -> chain[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())
