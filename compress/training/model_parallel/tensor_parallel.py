"""Tensor parallelism: processes share each block's matrices (Shoeybi et al., "Megatron-LM", 2019).

The first linear layers of a block are cut by outputs, the last by inputs, so that each process
computes whole heads and neurons, and only the block's sum is exchanged.
"""

from __future__ import annotations

import difflib
import re
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from compress.common.errors import StageFailed
from compress.training.model_parallel.equivalence_check import (
    everywhere,
    forward_and_backward,
    named,
    take_sketches_,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from compress.training.config.parallel import Parallel
    from compress.training.model_parallel.equivalence_check import Proof

HOW = "write parallel.tensor_plan, e.g. {'*.mlp.up': column, '*.mlp.down': row}"

# What is cut by outputs, and what then is cut by inputs, below one parent; the longest first.
FAMILIES: tuple[tuple[str, str], ...] = (
    ("q_proj k_proj v_proj", "o_proj out_proj"),
    ("wq wk wv", "wo"),
    ("q k v", "o out proj"),
    ("to_q to_k to_v", "to_out to_out.0"),
    ("q_lin k_lin v_lin", "out_lin"),
    ("query_proj key_proj value_proj", "out_proj"),
    ("query key value", "out output proj out_proj"),
    ("self.query self.key self.value", "output.dense"),
    ("attention.query attention.key attention.value", "output.dense"),
    ("gate_proj up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("gate up", "down"),
    ("up", "down"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("w1 w3", "w2"),
    ("w1", "w2"),
    ("wi_0 wi_1", "wo"),
    ("wi", "wo"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("intermediate.dense", "output.dense"),
)
HEADS = re.compile(r"^(?!.*(dim|size|width|mask|group)).*head")
"""Names of attributes that hold a number of heads, not what a head measures."""


def apply_tensor_parallel_(
    module: nn.Module, parallel: Parallel, mesh: DeviceMesh, proof: Proof
) -> list[str]:
    """Cut a whole module's matrices over a mesh, in place.

    Returns:
        The names of whole weights that each process uses for its own heads or neurons alone: their
        gradients must be added up over the mesh.

    Raises:
        StageFailed: the plan does not fit the module, or the result does not answer as the whole.
    """
    plan = tensor_parallel_plan(module, parallel)
    refuse_what_does_not_divide(module, plan, parallel.tensor)
    counts = _counts(module, plan)
    _cut_(module, plan, mesh)
    told = []
    for smaller in counts:
        with _scaled_head_counts(smaller, parallel.tensor) as keep:
            partial, wrong = _attempt(module, mesh, proof)
            if not wrong:
                keep()
                return partial
            told.append(wrong)
    raise StageFailed(
        f"parallel.tensor: cut over {parallel.tensor} processes the model does not answer as the "
        f"whole one: {told[0]}; {HOW}, and leave out what is not made of heads or neurons"
    )


def tensor_parallel_plan(module: nn.Module, parallel: Parallel) -> dict[str, str]:
    """Return how each linear layer that is cut is cut, by its name.

    Raises:
        StageFailed: a pattern matches nothing, or something that is no linear layer; or no plan is
            given and no layers with conventional names are found.
    """
    if not parallel.tensor_plan:
        plan = dict(_found(module))
        if not plan:
            raise StageFailed(
                "parallel.tensor: no attention or feed-forward layers of class Linear with "
                f"conventional names are found in the model; {HOW}"
            )
        return plan
    plan = {}
    for pattern, how in parallel.tensor_plan.items():
        names = [name for name, _ in module.named_modules() if name and fnmatchcase(name, pattern)]
        if not names:
            raise StageFailed(_unknown(pattern, module))
        for name in names:
            kind = type(module.get_submodule(name))
            if not issubclass(kind, nn.Linear):
                raise StageFailed(
                    f"parallel.tensor_plan: {name!r} is a {kind.__name__}, expected a Linear"
                )
            plan[name] = how
    return plan


def _found(module: nn.Module) -> Iterator[tuple[str, str]]:
    taken: set[str] = set()
    for parent, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            continue  # it uses the weights of parts that it does not call
        for columns, rows in FAMILIES:
            own = [_linear(part, column) for column in columns.split()]
            end = next((row for row in rows.split() if _linear(part, row)), None)
            names = [".".join(filter(None, (parent, x))) for x in (*columns.split(), end or "")]
            if end is None or not all(own) or taken & set(names):
                continue
            taken |= set(names)
            yield from ((name, "column") for name in names[:-1])
            yield names[-1], "row"


def _linear(part: nn.Module, path: str) -> bool:
    *parents, name = path.split(".")
    for parent in parents:
        found = part._modules.get(parent)
        if found is None or isinstance(found, nn.MultiheadAttention):
            return False
        part = found
    return isinstance(part._modules.get(name), nn.Linear)


def _unknown(pattern: str, module: nn.Module) -> str:
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    general = sorted({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in linear})
    near = difflib.get_close_matches(pattern, [*general, *linear], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(general) or 'no Linear'}"
    return f"parallel.tensor_plan: no module's name matches {pattern!r}; {hint}"


def _cut_(module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if how == "column" else RowwiseParallel()
        for name, how in plan.items()
    }
    trained = {name: weight.requires_grad for name, weight in module.named_parameters()}
    parallelize_module(module, mesh, styles)
    for name, weight in module.named_parameters():
        weight.requires_grad_(trained[name])
    # Layers that torch fuses in evaluation read the weights themselves, not through the layers.
    torch.backends.mha.set_fastpath_enabled(False)


@contextmanager
def _scaled_head_counts(
    counts: Sequence[tuple[nn.Module, str]], ranks: int
) -> Iterator[Callable[[], object]]:
    """Divide numbers that modules store for a block, or for good."""
    with ExitStack() as stack:
        for part, name in counts:
            whole = getattr(part, name)
            stack.callback(setattr, part, name, whole)
            setattr(part, name, whole // ranks)
        yield stack.pop_all


def refuse_what_does_not_divide(module: nn.Module, plan: Mapping[str, str], ranks: int) -> None:
    """Refuse layers and heads that cannot be shared equally.

    Raises:
        StageFailed: there are such.
    """
    for name, how in plan.items():
        layer: Any = module.get_submodule(name)
        features = layer.out_features if how == "column" else layer.in_features
        if features % ranks:
            raise StageFailed(
                f"parallel.tensor: {name!r} has {features} "
                f"{'outputs' if how == 'column' else 'inputs'}, which do not divide over {ranks}"
            )
    for part, attribute in _heads(module, plan):
        if getattr(part, attribute) % ranks:
            name = next(name for name, each in module.named_modules() if each is part)
            raise StageFailed(
                f"parallel.tensor: {name!r} has {getattr(part, attribute)} heads ({attribute}), "
                f"which do not divide over {ranks} processes; lower tensor, or {HOW}"
            )


def _counts(module: nn.Module, plan: Mapping[str, str]) -> list[list[tuple[nn.Module, str]]]:
    """Return what may have to be divided by the number of processes, by growing boldness.

    Attention that views its columns as (…, -1, head size) needs nothing; with (…, heads, -1) its
    number of heads; and when it puts heads together by a stored width, that too.
    """
    heads = _heads(module, plan)
    attentions = {part for part, _ in heads}
    widths = [
        (part, name)
        for part in attentions
        for name, value in vars(part).items()
        if type(value) is int
        and (part, name) not in heads
        and value in {c.out_features for c in part.children() if isinstance(c, nn.Linear)}
    ]
    tries = [[], heads, heads + widths]
    return [t for i, t in enumerate(tries) if t not in tries[:i]]


def _heads(module: nn.Module, plan: Mapping[str, str]) -> list[tuple[nn.Module, str]]:
    parents = {n.rpartition(".")[0]: None for n, how in plan.items() if how == "column"}
    return [
        (module.get_submodule(parent), name)
        for parent in parents
        for name, value in vars(module.get_submodule(parent)).items()
        if type(value) is int and HEADS.search(name)
    ]


def _attempt(module: nn.Module, mesh: DeviceMesh, proof: Proof) -> tuple[list[str], str]:
    """Return which weights are used in parts, and what is wrong; every process returns the same."""
    wrong = ""
    try:
        wrong = proof.wrong_output(forward_and_backward(module, proof.inputs))
    except (RuntimeError, ValueError, TypeError) as error:
        wrong = str(error).strip().partition("\n")[0]
    if not everywhere(not wrong):
        module.zero_grad()
        return [], wrong or "another process says so"
    whole = {name for name, weight in module.named_parameters() if not isinstance(weight, DTensor)}
    sketches = take_sketches_(module)
    suspects = proof.wrong_gradients(sketches)
    group = mesh.get_group()
    partial: list[str] = []
    wrong_names: list[str] = []
    for name in sketches:
        if everywhere(name not in suspects):
            continue
        total = sketches[name].clone()
        dist.all_reduce(total, group=group)
        adds_up = everywhere(name in whole and proof.agrees(name, total))
        (partial if adds_up else wrong_names).append(name)
    return partial, f"the gradient of {named(wrong_names)} differs" if wrong_names else ""
