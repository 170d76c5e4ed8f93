"""Caches for work that torch repeats in one process, and switches for what nobody reads."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from compress.common.foreign.patching import patched_attribute

BACKENDS = ("CPU", "CUDA", "Meta")
"""Those of tensors on the devices that the toolkit supports, and of tensors without numbers."""
OVERRIDDEN = {
    "_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE": [f"Autograd{name}" for name in BACKENDS],
    "_BACKEND_KEYS_TO_OVERRIDE": BACKENDS,
}
"""Table of `torch.export.exported_program` → the names of the keys to leave in it."""


@contextmanager
def without_stack_traces() -> Iterator[None]:
    """Let nodes of graphs that are made in a block not say which line of code they come from."""
    from torch.fx import config as fx_config

    # torch reads the lines of the code behind every node: a tenth of a trace.
    with patched_attribute(fx_config, "do_not_emit_stack_traces", True):
        yield


@contextmanager
def cheap_shape_cache() -> Iterator[None]:
    """Let torch remember the shapes of operators' results in a block without making each twice.

    Where a size depends on data, it makes them twice all the same.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    # torch 2.13 makes each result once more from what it remembers of it, to compare the dispatch
    # keys, which are those of a scalar, too. With symbolic sizes: a fifth of a decoder's trace.
    name = "_get_output_info_for_cache_entry"
    remember: Any = getattr(FakeTensorMode, name, None)

    def remember_by_scalar(mode: Any, *details: Any) -> Any:
        depends_on_data = getattr(mode.shape_env, "unbacked_symint_counter", 0)
        return remember(mode if depends_on_data else _Scalars(mode), *details)

    with patched_attribute(FakeTensorMode, name, remember_by_scalar):
        yield


class _Scalars:
    """Makes a scalar of the same kind where a mode would make the result of an operator."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mode, name)

    def _output_from_cache_entry(self, state: Any, entry: Any, key: Any, *rest: Any) -> Any:
        sizes = {"shape": (), "stride": (), "storage_offset": 0, "storage_bytes": None}
        try:
            (output,) = entry.output_infos
            scalar = replace(output, metadata=replace(output.metadata, **sizes))
            entry = replace(entry, output_infos=(scalar,))
        except (AttributeError, TypeError, ValueError):  # another release's entries
            return self._mode._output_from_cache_entry(state, entry, key, *rest)
        # No operator: a view shares the memory of its input, which changes no key.
        return self._mode._output_from_cache_entry(state, entry, key, None, ())


@contextmanager
def unchecked_serialization() -> Iterator[None]:
    """Let torch write a program without a check of its own in a block."""
    from torch._export.serde import serialize

    # torch 2.13 brings a copy of the graph into its canonical form and drops it, to see whether
    # that raises: two thirds of the time.
    with patched_attribute(serialize, "canonicalize", lambda program, constants=None: program):
        yield


@contextmanager
def cached_composite_ops() -> Iterator[None]:
    """Let torch list its composite operators once in a block in which none is registered.

    Nodes of graphs that are made in it do not say which line of code they come from.
    """
    from torch._export import utils
    from torch.export import exported_program

    # To decompose a graph, torch 2.13 lists all of them in each of some thirty namespaces, twice in
    # an export to ONNX: a quarter of the time that a small model takes.
    name = "_materialize_cpp_cia_ops"
    # And it overrides each of 525 for 21 backends, most of which no tensor here can have: a third.
    autograd, kernels = (
        (name, [key for key in getattr(exported_program, name, ()) if key.name in wanted])
        for name, wanted in OVERRIDDEN.items()
    )
    with (
        without_stack_traces(),
        cheap_shape_cache(),
        patched_attribute(utils, name, functools.cache(getattr(utils, name, lambda: None))),
        patched_attribute(exported_program, *autograd),
        patched_attribute(exported_program, *kernels),
    ):
        yield


@contextmanager
def cached_deserialization() -> Iterator[None]:
    """Let torch evaluate its dataclasses' annotations and parse each symbolic size once in a block.

    Of a graph that it loads: torch 2.13 does both for each part of each node.
    """
    from torch._export.serde import serialize

    # Annotations take two fifths of the time, and of the rest sympy's parser as much.
    known: dict[Any, dict[str, Any]] = {}

    def get_type_hints(of: Any, **named: Any) -> dict[str, Any]:
        if of not in known:
            known[of] = typing.get_type_hints(of, **named)
        return known[of]

    cached_typing = ModuleType("typing")
    vars(cached_typing).update({**vars(typing), "get_type_hints": get_type_hints})
    deserializer, parse = serialize.GraphModuleDeserializer, "_parse_sym_expr"
    parsed = functools.lru_cache(None, typed=True)(getattr(deserializer, parse, lambda: None))
    with (
        patched_attribute(serialize, "typing", cached_typing),
        patched_attribute(deserializer, parse, parsed),
    ):
        yield
