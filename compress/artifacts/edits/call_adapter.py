"""How a user's forward is called with the signature's tensors, and what its outputs are called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.eager_model import flatten_outputs, kept_modes, name_outputs
from compress.artifacts.recipe import CallByName
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.signature import OutputSpec, Signature

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT = "output"


def call_by_name_(module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Let a module take tensors in an order of its own, and give a tuple of entries, in place.

    Its class becomes a subclass of the same name; no parameter is renamed.

    Args:
        module: the module.
        inputs: the parameter of forward for each tensor; none to pass them on by position.
        outputs: the entries of the answer that are given, in order; none to give it whole.
    """
    kind = type(module)
    taken = inspect.signature(kind.forward)

    def forward(self: torch.nn.Module, *tensors: torch.Tensor) -> Any:
        if inputs:
            answer = kind.forward(self, **dict(zip(inputs, tensors, strict=True)))
        else:
            answer = kind.forward(self, *tensors)
        if not outputs:
            return answer
        entries = entries_of(answer)
        return tuple(entries[name] for name in outputs)

    if inputs:
        # torch.export reads the parameters' names and number here.
        own, *_ = taken.parameters.values()
        each = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in inputs]
        taken = inspect.Signature([own, *each])
    forward.__signature__ = taken  # type: ignore[attr-defined]
    told = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), {**told, "forward": forward})


def fit_call(
    module: torch.nn.Module, signature: Signature, inputs: Sequence[torch.Tensor]
) -> tuple[CallByName | None, Signature]:
    """Return how a module is to be called, and the signature with the outputs' names.

    Inputs named like parameters of forward are passed to them, whatever their order; other names
    are free, and pass by position. Names of outputs choose among those that there are, or name all
    outputs anew.

    Args:
        module: the module; it is run once and not changed.
        signature: the interface as the user declared it.
        inputs: an example of its inputs.

    Returns:
        The edit that the module's recipe needs, if any, and the completed signature.

    Raises:
        PipelineInvalid: names contradict forward's parameters or what it returns.
        ArtifactInvalid: the module returns no tensors.
    """
    keywords = _keywords(module, [spec.name for spec in signature.inputs])
    with kept_modes(module), torch.inference_mode():
        module.eval()
        answer = module(**dict(zip(keywords, inputs, strict=True))) if keywords else module(*inputs)
    chosen, signature = with_outputs(answer, signature)
    edit = CallByName(inputs=keywords, outputs=chosen) if keywords or chosen else None
    return edit, signature


def positional_parameters(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that forward takes by position."""
    found = inspect.signature(module.forward).parameters.values()
    return [p.name for p in found if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _keywords(module: torch.nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters to pass inputs to by keyword; none where their position says it."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    own = [p.name for p in parameters if p.kind not in variable]
    if list(names) == positional_parameters(module)[: len(names)]:
        return ()
    if set(names) <= set(own):
        return tuple(names)
    elsewhere = [n for i, n in enumerate(names) if n in own and n != "".join(own[i : i + 1])]
    if elsewhere:
        unknown = [n for n in names if n not in own]
        raise PipelineInvalid(
            f"model.inputs: {elsewhere[0]!r} is a parameter of forward and {unknown[0]!r} is none; "
            f"name each input as forward does ({', '.join(own)}), or none of them"
        )
    return ()


def with_outputs(answer: Any, signature: Signature) -> tuple[tuple[str, ...], Signature]:
    """Return the entries to choose of an answer, if not all, and the signature with their names.

    Raises:
        PipelineInvalid: there are not as many tensors as names, or some names alone are known.
        ArtifactInvalid: there is anything but tensors in it.
    """
    wanted = [o.name for o in signature.outputs]
    given = "outputs" in signature.model_fields_set
    entries = entries_of(answer)
    known = [name for name in wanted if name in entries]
    if given and known == wanted:
        flat = list(_named(answer)) if _is_flat(answer) else []
        return (() if wanted == flat else tuple(wanted)), signature
    if given and known:
        raise PipelineInvalid(f"model.outputs names {wanted}, and the model returns {[*entries]}")
    try:
        flatten_outputs(answer)
    except ArtifactInvalid as error:
        told = f"; choose among {', '.join(entries)} with model.outputs" if entries else ""
        raise ArtifactInvalid(f"{error}{told}") from None
    found = _unlike(list(_named(answer)), {spec.name for spec in signature.inputs})
    if not given:
        outputs = tuple(OutputSpec(name=name) for name in found)
        return (), signature.model_copy(update={"outputs": outputs})
    if len(found) != len(wanted) and entries:
        raise PipelineInvalid(f"model.outputs names {wanted}, and the model returns {[*entries]}")
    return (), name_outputs(signature, len(found))


def entries_of(answer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an answer by key, and those without one by the name they get."""
    flat = (
        dict(zip(_named(answer), flatten_outputs(answer), strict=True)) if _is_flat(answer) else {}
    )
    if hasattr(answer, "_asdict"):
        answer = answer._asdict()
    if not isinstance(answer, Mapping):
        answer = {"logits": answer.logits} if hasattr(answer, "logits") else {}
    own = {str(k): v for k, v in answer.items() if isinstance(v, torch.Tensor)}
    return own | {name: tensor for name, tensor in flat.items() if name not in own}


def _is_flat(answer: Any) -> bool:
    try:
        flatten_outputs(answer)
    except ArtifactInvalid:
        return False
    return True


def _named(answer: Any, name: str = "") -> list[str]:
    """Return a name for each tensor of an answer, in the order of :func:`flatten_outputs`."""
    if isinstance(answer, torch.Tensor):
        return [name or OUTPUT]
    if hasattr(answer, "logits"):
        return [f"{name}_logits" if name else "logits"]
    if hasattr(answer, "_asdict"):
        answer = answer._asdict()
    if isinstance(answer, Mapping):
        pairs = [(re.sub(r"\W", "_", str(key)), value) for key, value in answer.items()]
        pairs = [(f"{name}_{key}" if name else key, value) for key, value in pairs]
    else:
        pairs = [(f"{name or OUTPUT}_{i}", v) for i, v in enumerate(answer) if v is not None]
    found = [n for key, value in pairs if value is not None for n in _named(value, key)]
    return [OUTPUT] if found == [f"{OUTPUT}_0"] else found


def _unlike(names: list[str], taken: set[str]) -> list[str]:
    """Return names that differ from each other and from the inputs'."""
    found: list[str] = []
    for name in names:
        while name in taken or name in found:
            name = f"{name}_{OUTPUT}"
        found.append(name)
    return found
