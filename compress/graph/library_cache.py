"""Caches for work that torch repeats in one process."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from contextlib import contextmanager
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
def cached_composite_ops() -> Iterator[None]:
    """Let torch list its composite operators once in a block in which none is registered.

    Nodes of graphs that are made in it do not say which line of code they come from.
    """
    from torch._export import utils
    from torch.export import exported_program
    from torch.fx import config as fx_config

    # To decompose a graph, torch 2.13 lists all of them in each of some thirty namespaces, twice in
    # an export to ONNX: a quarter of the time that a small model takes.
    name = "_materialize_cpp_cia_ops"
    # And it overrides each of 525 for 21 backends, most of which no tensor here can have: a third.
    autograd, kernels = (
        (name, [key for key in getattr(exported_program, name, ()) if key.name in wanted])
        for name, wanted in OVERRIDDEN.items()
    )
    with (
        # It reads the lines of the code behind every node, which are never shown.
        patched_attribute(fx_config, "do_not_emit_stack_traces", True),
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
