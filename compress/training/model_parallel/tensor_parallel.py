"""Tensor parallelism: each process has a slice of every matrix.

After Shoeybi et al., "Megatron-LM" (2019). The first linear layers of a block are split by outputs,
the last by inputs, so that each process computes whole heads and neurons, and one all-reduce sums
the block's output.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from compress.training.config.parallel import Parallel

HOW = "write parallel.tensor_plan, e.g. {'*.mlp.up': column, '*.mlp.down': row}"

# Conventional names of layers below one parent: those split by outputs, and the one then split by
# inputs. The first match counts, so longer rows come before their subsets.
LAYER_NAMES: tuple[tuple[str, str], ...] = (
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
"""Names of attributes with a number of heads, and not a size of one head."""

Attributes: TypeAlias = "list[tuple[nn.Module, str]]"
"""Attributes of modules that hold a number of heads, or a width."""


def split_matrices_(module: nn.Module, parallel: Parallel, mesh: DeviceMesh) -> list[Attributes]:
    """Split a module's matrices over a mesh, in place.

    Returns sets of attributes, one of which must also be divided by the number of processes.
    """
    plan = tensor_parallel_plan(module, parallel)
    require_divisible(module, plan, parallel.tensor)
    candidates = _attributes_to_scale(module, plan)
    kinds = {"column": ColwiseParallel, "row": RowwiseParallel}
    styles: dict[str, ParallelStyle] = {name: kinds[how]() for name, how in plan.items()}
    trained = {name: weight.requires_grad for name, weight in module.named_parameters()}
    parallelize_module(module, mesh, styles)
    # torch's slices are new parameters, all of which require gradients.
    for name, weight in module.named_parameters():
        weight.requires_grad_(trained[name])
    # In eval mode torch's fused transformer layers read the weights without calling the layers.
    torch.backends.mha.set_fastpath_enabled(False)
    return candidates


@contextmanager
def divided_(attributes: Attributes, ranks: int) -> Iterator[ExitStack]:
    """Divide attributes by the number of processes for a block; `pop_all` keeps them divided."""
    with ExitStack() as stack:
        for part, attribute in attributes:
            count = getattr(part, attribute)
            stack.callback(setattr, part, attribute, count)
            setattr(part, attribute, count // ranks)
        yield stack


def tensor_parallel_plan(module: nn.Module, parallel: Parallel) -> dict[str, str]:
    """Return `column` or `row` for the name of each linear layer to split."""
    if not parallel.tensor_plan:
        plan = dict(_conventional_plan(module))
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
            linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
            general = sorted({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in linear})
            near = difflib.get_close_matches(pattern, [*general, *linear], n=1, cutoff=0.5)
            known = ", ".join(general) or "no Linear"
            raise StageFailed(
                f"parallel.tensor_plan: no module's name matches {pattern!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"it has {known}")
            )
        for name in names:
            kind = type(module.get_submodule(name))
            if not issubclass(kind, nn.Linear):
                raise StageFailed(
                    f"parallel.tensor_plan: {name!r} is a {kind.__name__}, expected a Linear"
                )
            plan[name] = how
    return plan


def _conventional_plan(module: nn.Module) -> Iterator[tuple[str, str]]:
    taken: set[str] = set()
    for parent, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            continue  # it reads the weights of submodules that it does not call
        for columns, rows in LAYER_NAMES:
            has_columns = all(_is_linear(part, column) for column in columns.split())
            row = next((row for row in rows.split() if _is_linear(part, row)), None)
            names = [".".join(filter(None, (parent, x))) for x in (*columns.split(), row or "")]
            if row is None or not has_columns or taken & set(names):
                continue
            taken |= set(names)
            yield from ((name, "column") for name in names[:-1])
            yield names[-1], "row"


def _is_linear(part: nn.Module, path: str) -> bool:
    *parents, name = path.split(".")
    for parent in parents:
        child = part._modules.get(parent)
        if child is None or isinstance(child, nn.MultiheadAttention):
            return False
        part = child
    return isinstance(part._modules.get(name), nn.Linear)


def require_divisible(module: nn.Module, plan: Mapping[str, str], ranks: int) -> None:
    """Refuse layers and heads that do not divide over the ranks."""
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


def _attributes_to_scale(module: nn.Module, plan: Mapping[str, str]) -> list[Attributes]:
    """Return sets of attributes that may have to be divided by the number of ranks, to be tried."""
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
    # Attention that views its columns as (…, -1, head size) needs none; with (…, heads, -1) its
    # number of heads; and where it concatenates heads to a stored width, that too.
    candidates = [[], heads, heads + widths]
    return [c for i, c in enumerate(candidates) if c not in candidates[:i]]


def _heads(module: nn.Module, plan: Mapping[str, str]) -> Attributes:
    parents = {n.rpartition(".")[0]: None for n, how in plan.items() if how == "column"}
    return [
        (module.get_submodule(parent), name)
        for parent in parents
        for name, value in vars(module.get_submodule(parent)).items()
        if type(value) is int and HEADS.search(name)
    ]
