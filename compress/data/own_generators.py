"""Finds the random generators that a dataset and its transforms own, and seeds them."""

from __future__ import annotations

import io
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from compress.common.code_origin import origin_of

MOST_OBJECTS = 20_000  # at most as many objects are searched for generators
LONGEST = 256
"""At most as many items of a container are searched: longer ones hold data, not transforms."""
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.Tensor, np.ndarray, ModuleType, logging.Logger, io.IOBase),
)
"""Types whose parts are not visited."""


def own_generators(*roots: Any) -> list[Any]:
    """Return generators reachable from objects, without the global ones, in fixed order.

    Searched are attributes, containers, closures, and the globals that the user's code names.
    """
    # Not public, but what `np.random.seed` and `random.seed` seed.
    shared = {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}
    return [
        value
        for value in islice(reachable_objects(*roots, longest=LONGEST), MOST_OBJECTS)
        if is_generator(value) and id(value) not in shared
    ]


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator that can be seeded, of the CPU."""
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    return isinstance(value, KINDS) and not isinstance(value, random.SystemRandom)


def seed_generators(generators: Sequence[Any], seed: int) -> None:
    """Seed generators, each with another number."""
    for number, generator in enumerate(generators, seed + 1):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(number).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(number % 2**32)
        else:
            generator.seed(number)


@contextmanager
def states_restored(generators: Sequence[Any]) -> Iterator[None]:
    """Restore the states of generators after a block."""
    restore: list[Callable[[], object]] = []
    for generator in generators:
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            restore.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(generator, random.Random):
            restore.append(partial(generator.setstate, generator.getstate()))
        else:
            restore.append(partial(generator.set_state, generator.get_state()))
    try:
        yield
    finally:
        for restore_one in restore:
            restore_one()


def draws_nothing(dataset: Any) -> bool:
    """Whether a dataset is tensors in memory, or parts of such, that no code of a user's reads."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    return type(dataset) is TensorDataset


def reads_batches(dataset: Any) -> bool:
    """Whether a dataset reads the samples of a batch together, instead of one by one."""
    # These have `__getitems__` only to pass it on.
    if type(dataset) is Subset:
        return reads_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(reads_batches, parts.values() if isinstance(parts, dict) else parts))
    return hasattr(dataset, "__getitems__")


def reachable_objects(*roots: Any, longest: int | None = None) -> Iterator[Any]:
    """Yield objects and all that they refer to, at most ``longest`` items of a container."""
    seen: dict[int, Any] = {}  # the values stay alive, so that no id is used twice
    queue = deque(roots)  # breadth first: generators lie nearer than the leaves of nested data
    while queue:
        value = queue.popleft()
        if isinstance(value, PLAIN):
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value
            yield value
            queue.extend(islice(parts_of(value), longest))


def parts_of(value: Any) -> Iterable[Any]:
    """Return the objects that an object refers to; of code, only the user's own is searched."""
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, list | tuple | deque):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, BuiltinMethodType):  # `random.Random().random`, say
        return (value.__self__,)
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, property):
        return (value.fget,)
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, type):
        own = [c for c in value.__mro__ if is_user_code(c)]
        return [
            part
            for c in own
            for name, part in vars(c).items()
            if is_generator(part)
            or isinstance(part, FunctionType | property | staticmethod | classmethod)
            or not name.startswith("__")
        ]
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    slots = (
        getattr(value, name)
        for c in type(value).__mro__
        for name in getattr(c, "__slots__", ())
        if isinstance(name, str) and hasattr(value, name) and name != "__dict__"
    )
    return (type(value), *slots, *getattr(value, "__dict__", {}).items())


def is_user_code(value: Any) -> bool:
    """Whether a class or function is the user's own, not one of a library or of this toolkit."""
    return origin_of(source_file(value)) == "user"


def source_file(value: Any) -> str:
    """Return the file that defines a class or function; ``<built-in>`` where there is none."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    module = sys.modules.get(value.__module__)
    return getattr(module, "__file__", None) or "<built-in>"


def _parts_of_function(function: FunctionType) -> Iterable[Any]:
    if not is_user_code(function):
        return ()
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    code, named = [function.__code__], []
    while code:
        current = code.pop()
        named += [n for n in current.co_names if n in function.__globals__]
        code += [c for c in current.co_consts if isinstance(c, type(current))]
    return (*(function.__defaults__ or ()), *cells, *(function.__globals__[n] for n in named))
