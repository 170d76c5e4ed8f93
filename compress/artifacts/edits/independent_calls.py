"""Calls of a module that leave its state and its inputs as they were.

A module may keep state between calls, such as the last frames of a stream, or change its inputs.
Here models are called in any order, so each call starts from the state that the model was given.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.common.errors import ArtifactInvalid
from compress.common.forward import outputs_by_name, plain_attention, preserve_modes
from compress.common.process import random_state_kept, random_states, reseed
from compress.common.signature import CallState
from compress.common.tensor_difference import relative_error

if TYPE_CHECKING:
    Outputs = list[torch.Tensor]
    Inputs = Sequence[torch.Tensor]
    Call = Callable[[Inputs], Any]

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
KEPT = "_state_kept_by_calls"
"""Attribute of a part: its buffers and attributes that each call of the whole starts from."""
PLAIN = (bool, int, float, complex, str, bytes, type(None))
ROUNDING = 1e-4
"""Part of the norm by which outputs of equal calls may differ: where tensors lie in memory decides
in which order products are added. On an EPYC with AVX2 a tiny BERT differed for 138 of 200
misaligned copies of its weights, by at most 3e-6."""
ABSENT = object()


class _ModuleState:
    """The buffers and own attributes of a module's parts at one moment, perhaps weights."""

    def __init__(self, module: nn.Module, *, weights: bool = False) -> None:
        self._module = module
        every = [*module.parameters()] if weights else []
        self._weights = [(weight, weight.data, weight.detach().clone()) for weight in every]
        # Weights and parts are not copied with an attribute that refers to them.
        self._memo: dict[int, Any] = {id(x): x for x in (*module.modules(), *module.parameters())}
        self._values = {k: (x, _copied(x, self._memo)) for k, x in _attributes(module).items()}

    def changed(self) -> list[str]:
        now = _attributes(self._module)
        return [
            name
            for name in dict.fromkeys([*self._values, *now])
            if not (name in now and name in self._values)
            or not _is_same(self._values[name][1], now[name])
        ]

    def restore(self) -> None:
        now = _attributes(self._module)
        parts = dict(self._module.named_modules(remove_duplicate=False))
        for name in dict.fromkeys([*self._values, *now]):
            value, copied = self._values.get(name, (ABSENT, None))
            if not _is_same(copied, value) and isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.copy_(copied)
            elif not _is_same(copied, value) and value is not ABSENT:
                value = _copied(copied, self._memo)
            if now.get(name, ABSENT) is not value:
                path, _, key = name.rpartition(".")
                part = parts[path]
                if isinstance(part, torch.jit.ScriptModule):  # whose tables are copies
                    setattr(part, key, value)
                    continue
                table: Any = part._buffers if key in part._buffers else vars(part)
                table[key] = value
                if value is ABSENT:
                    del table[key]
        for weight, data, copied in self._weights:
            weight.data = data.copy_(copied)


@contextmanager
def unchanged(module: nn.Module, *, weights: bool = False) -> Iterator[_ModuleState]:
    """Restore modes, buffers, attributes, random numbers, and perhaps weights after a block."""
    state = _ModuleState(module, weights=weights)
    with preserve_modes(module), random_state_kept("cpu"):
        try:
            yield state
        finally:
            state.restore()


def call_effects(
    module: nn.Module, call: Call, inputs: Inputs
) -> tuple[Any, CallState | None, bool, bool]:
    """Call a module once, more often if that changes it or draws random numbers, and restore it.

    Returns its output in eval mode, what to restore after each call, and whether a call changes its
    inputs, and is random. Attributes that are no persistent buffers, such as masks that are created
    when they are needed, count only if later outputs depend on state.
    """
    with unchanged(module) as before, plain_attention():
        module.eval()
        given, numbers = [x.clone() for x in inputs], random_states()
        with torch.inference_mode():
            output = call(given)
        draws = not _is_same(numbers, random_states())
        changes_inputs = not all(map(_is_same, inputs, given))
        changed = before.changed()
        is_read = False
        if changed:
            later = [x / 2 if x.is_floating_point() else x for x in inputs]
            continued = _outcome(call, later)
            before.restore()
            is_read = not _is_same_outcome(continued, _outcome(call, later))
        is_random = False
        if draws:
            outcomes = []
            for seed in range(2):
                before.restore()
                reseed(seed, "cpu")
                outcomes.append(_outcome(call, inputs))
            is_random = not _is_same_outcome(*outcomes)
    stored = module.state_dict(keep_vars=True)
    names = tuple(name for name in changed if is_read or name in stored)
    if is_read and not isinstance(module, torch.jit.ScriptModule):
        owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in names}
        if scripted := [n for n, x in owners.items() if isinstance(x, torch.jit.ScriptModule)]:
            raise ArtifactInvalid(
                f"the model keeps state between calls in {', '.join(scripted[:3])}, of a "
                "TorchScript module inside it, which no call can start anew; make the state an "
                "input and an output of forward, or give the TorchScript file as model.file"
            )
    state = CallState(names=names, is_read=is_read) if names else None
    return output, state, changes_inputs, is_random


@contextmanager
def needed_hooks_alone(module: nn.Module, call: Call, inputs: Inputs) -> Iterator[None]:
    """Remove a module's forward and backward hooks for a block, unless they change its outputs.

    Those of torch, such as ``weight_norm``, stay. Others are called for two forward passes, in eval
    and in training mode: a hook that logs would count the toolkit's calls as the user's.
    """
    removed = []
    for part in module.modules():
        for name in HOOKS:
            hooks = getattr(part, name)
            removed += [(hooks, key, hook) for key, hook in hooks.items() if not _is_torchs(hook)]
    own = [(hooks, dict(hooks)) for hooks in {id(hooks): hooks for hooks, *_ in removed}.values()]

    def outcomes() -> list[Outputs | None]:
        found = []
        for training in (False, True):
            with unchanged(module), plain_attention():
                module.train(training)
                found.append(_outcome(call, inputs))
        return found

    try:
        if removed:
            expected = outcomes()
            for hooks, key, _ in removed:
                del hooks[key]
            if not all(map(_is_same_outcome, expected, outcomes())):
                for hooks, before in own:
                    hooks.update(before)
        yield
    finally:
        for hooks, before in own:
            hooks.clear()
            hooks.update(before)


def make_calls_independent_(
    module: nn.Module, state: Sequence[str], *, in_training: bool, copies_inputs: bool
) -> None:
    """Make a module start each call from its stored state, and copy its inputs, in place."""
    for name in state:
        path, _, key = name.rpartition(".")
        part = module.get_submodule(path)
        # On the parts, so that copies of the module have their own, also after parts were removed.
        setattr(part, KEPT, (*getattr(part, KEPT, ()), key))
    original = type(module).forward

    def forward(own: nn.Module, *tensors: torch.Tensor) -> Any:
        if copies_inputs:
            tensors = tuple(x.clone() for x in tensors)
        if own.training and not in_training:
            return original(own, *tensors)
        memo: dict[int, Any] = {id(x): x for x in (*own.modules(), *own.parameters())}
        before = []
        for part in own.modules():
            keys, buffers = getattr(part, KEPT, ()), part._buffers
            before += [(part, key, vars(part).get(key, ABSENT)) for key in keys]
            if keys:
                before.append((part, "_buffers", buffers))
                copies = {k: _copied(x, memo) for k, x in buffers.items() if k in keys}
                part._buffers = {**buffers, **copies}
                if torch.compiler.is_exporting():
                    # As attributes: torch.export writes what is assigned to a buffer of the outer
                    # module to the graph, which would change the buffer whenever it is called.
                    part._buffers = {k: x for k, x in buffers.items() if k not in keys}
                    vars(part).update(copies)
        try:
            for part, key, value in before:
                if key != "_buffers" and value is not ABSENT:
                    vars(part)[key] = _copied(value, memo)
            return original(own, *tensors)
        finally:
            for part, key, value in before:
                vars(part).pop(key, None)
                if value is not ABSENT:
                    vars(part)[key] = value

    replace_forward_(module, forward, inspect.signature(original))


def replace_forward_(
    module: nn.Module, forward: Callable[..., Any], signature: inspect.Signature
) -> None:
    """Give a module, but not its class, another forward, in place."""
    kind = type(module)
    # torch.export reads the parameters' names and number here.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    # A subclass of the same name, as a wrapping module would rename every parameter.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), {**names, "forward": forward})


def _is_torchs(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch.")


def _is_opaque(value: Any) -> bool:
    """Whether a value is code, or an object of torch such as a graph, and so taken as constant."""
    return callable(value) or _is_torchs(value)


def _attributes(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, torch.jit.ScriptModule):
        types = script_attributes(module) if hasattr(module, "forward") else ()
        return {name: attrgetter(name)(module) for name in types}
    found: dict[str, Any] = {}
    scripts: list[str] = []
    for path, part in module.named_modules():
        if path.startswith(tuple(scripts)):
            continue
        prefix = f"{path}." if path else ""
        if isinstance(part, torch.jit.ScriptModule):
            scripts.append(prefix)
            found |= {f"{prefix}{key}": value for key, value in _attributes(part).items()}
        else:
            own = {k: x for k, x in vars(part).items() if k not in OF_EVERY_MODULE}
            found |= {f"{prefix}{key}": value for key, value in {**part._buffers, **own}.items()}
    return found


def script_attributes(module: torch.jit.ScriptModule) -> dict[str, str]:
    """Return what forward reads of a TorchScript module: dotted names → TorchScript types.

    Raises ArtifactInvalid: it writes to an object that is no module, which cannot be restored.
    """
    graph: Any = module.inlined_graph  # the nodes live as long as this name does
    parts = {name for name, _ in module.named_modules(remove_duplicate=False)}
    types = {}
    for node in [n for kind in ("GetAttr", "SetAttr") for n in graph.findAllNodes(f"prim::{kind}")]:
        owners, value = list[str](), next(node.inputs())
        while value.node().kind() == "prim::GetAttr":
            owners.insert(0, value.node().s("name"))
            value = value.node().input()
        name, is_part = ".".join([*owners, node.s("name")]), ".".join(owners) in parts
        if node.kind() == "prim::SetAttr" and not is_part:
            raise ArtifactInvalid(
                f"the TorchScript module keeps state in {name}, of an object that is no module, "
                "which no call can start anew; make the state an input and an output of forward"
            )
        if node.kind() == "prim::GetAttr" and is_part and name not in parts:
            types[name] = str(node.output().type().annotation_str)
    return types


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy what a call may change; what cannot be copied is returned as it is."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(x, memo) for x in value)
    if type(value) is dict:
        return {key: _copied(x, memo) for key, x in value.items()}
    if _is_opaque(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - such as locks and sessions of other runtimes
        return value


def _is_same(a: Any, b: Any, compared: set[int] | None = None) -> bool:
    """Whether two values are equal; of other objects, whether their attributes are."""
    compared = set() if compared is None else compared
    if a is b or id(a) in compared:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*map(_bits, (a, b)))
    if isinstance(a, PLAIN):
        return bool(a == b or (a != a and b != b))
    compared.add(id(a))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_is_same(x, y, compared) for x, y in zip(a, b, strict=True))
    if _is_opaque(a):
        return True
    if not isinstance(a, dict):
        a, b = getattr(a, "__dict__", {}), getattr(b, "__dict__", {})
    return [*a] == [*b] and all(_is_same(a[key], b[key], compared) for key in a)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # A number for NaN, so that NaN equals NaN.
    return tensor.nan_to_num(nan=0.5) if tensor.is_floating_point() else tensor


def _outcome(call: Call, inputs: Inputs) -> Outputs | None:
    """Copy a call's outputs, which may be views of state, under fixed seeds; None if it fails."""
    try:
        with random_state_kept("cpu"), torch.inference_mode():
            outputs = outputs_by_name(call([x.clone() for x in inputs]))
            return [x.clone() for x in outputs.values()]
    except Exception:  # noqa: BLE001 - a user's model may raise anything
        return None


def _is_same_outcome(a: Outputs | None, b: Outputs | None) -> bool:
    if a is None or b is None:
        return a is b
    same_count = len(a) == len(b)
    return same_count and all(relative_error(*pair) <= ROUNDING for pair in zip(a, b, strict=True))
