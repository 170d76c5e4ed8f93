"""Convert a graph to half precision where its values fit; the rest stays float32."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from compress.common.errors import StageFailed, first_line
from compress.graph.lifting import program_of_graph
from compress.quantization.pt2e.graph_capture import (
    NodeTap,
    capture,
    describe_tensor,
    is_excluded,
    name_inputs_,
    remove_unread_tensors_,
)
from compress.quantization.pt2e.quantizer import fold_batch_norms_, is_float
from compress.quantization.ptq.calibrate import require_matching_inputs

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compress.common.signature import Signature
    from compress.data.batch import Batch

aten = torch.ops.aten
SENSITIVE = {
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "softplus"),
    *("layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "rms_norm"),
    *("batch_norm", "instance_norm", "_native_batch_norm_legit_no_training"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "sqrt", "rsqrt"),
    *("reciprocal", "sum", "mean", "var", "std", "prod", "cumsum", "cumprod", "norm"),
    *("linalg_vector_norm", "cosine_similarity", "cdist", "sinh", "cosh", "tan", "erfinv"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
}
"""Operators whose sums or curves need float32's digits or range, as in torch's own autocast."""
ANY_DTYPE = {
    *("reshape", "permute", "transpose", "t", "flatten", "unflatten"),
    *("squeeze", "unsqueeze", "expand", "slice", "select", "split", "chunk", "unbind"),
    *("clone", "alias", "detach", "contiguous", "dropout", "relu"),
}
"""Operators that are exact in any precision: their output keeps the dtype of the input."""
ATTENTION = aten.scaled_dot_product_attention.default


@dataclass
class ValueStatistics:
    """Sums over the values of one tensor, and over their errors in half precision."""

    largest: float = 0.0
    squares: float = 0.0
    squared_errors: float = 0.0

    def update(self, values: torch.Tensor, dtype: torch.dtype, bound: float = 0.0) -> None:
        """Add values, and a bound of intermediate values that are no tensor of the graph."""
        finite = values[values.isfinite()].double()  # infinity is the same in every precision
        rounded = finite.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).double()
        peak = float(finite.abs().max()) if finite.numel() else 0.0
        self.largest = max(self.largest, peak, bound)
        self.squares += float(finite.square().sum())
        self.squared_errors += float((finite - rounded).square().sum())

    def reason_for_float32(self, dtype: torch.dtype, headroom: float) -> str | None:
        """Return why half precision cannot represent the values, or None."""
        limits = torch.finfo(dtype)
        name = str(dtype).removeprefix("torch.")
        if self.largest * headroom > limits.max:
            return f"reaches {self.largest:.3g}, {name} ends at {limits.max:.3g}"
        # Rounding within the format's normal range errs by half of eps at most.
        if self.squared_errors > limits.eps**2 * self.squares:
            lost = (self.squared_errors / self.squares) ** 0.5
            return f"is {self.largest:.2g} at most, {name} loses {lost:.0%} of numbers so small"
        return None


@dataclass
class PrecisionConverter:
    """Chooses the operators that compute in half precision; records the others, and why."""

    dtype: torch.dtype
    headroom: float
    exclude: tuple[str, ...] = ()
    statistics: dict[fx.Node, ValueStatistics] = field(default_factory=dict)
    """Of each float32 tensor of the graph."""
    unsupported: dict[Any, str] = field(default_factory=dict)
    """Operator without a half-precision kernel here → torch's error message."""
    converted: Counter[str] = field(default_factory=Counter)
    """Number of operators in half precision by kind."""
    sensitive: Counter[str] = field(default_factory=Counter)
    """Number of operators left in float32 for their kind."""
    out_of_range: dict[str, str] = field(default_factory=dict)
    """Tensor or operator left in float32 → why."""

    def measuring_run(self, graph: fx.GraphModule) -> NodeTap:
        """Return a run of a float32 graph that measures tensors and tries operators in half."""
        tried: set[Any] = set()

        def to_half(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.dtype is torch.float32
            return value.to(self.dtype) if is_float else value

        def observe(n: fx.Node, _: Any, value: Any) -> Any:
            if n.op == "get_attr":
                n.meta.setdefault("val", value)  # folding BatchNorm adds biases without it
            if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
                if value.isnan().any():
                    raise StageFailed(
                        f"{describe_tensor(n)} is NaN in float32 already; mend data or weights"
                    )
                if n.op != "get_attr" or n not in self.statistics:  # weights: once for all batches
                    bound = 0.0
                    if n.target is ATTENTION:  # of the scores inside, by Cauchy and Schwarz
                        (query, key, *_), options = run.fetch_args_kwargs_from_env(n)
                        scale = options.get("scale") or query.shape[-1] ** -0.5
                        bound = float(query.norm(dim=-1).max() * key.norm(dim=-1).max() * scale)
                    statistics = self.statistics.setdefault(n, ValueStatistics())
                    statistics.update(value, self.dtype, bound)
            if is_convertible(n) and n.target not in tried:
                tried.add(n.target)
                arguments: Any = map_aggregate(run.fetch_args_kwargs_from_env(n), to_half)
                try:
                    n.target(*arguments[0], **arguments[1])  # type: ignore[operator]  # of aten
                except (RuntimeError, NotImplementedError) as error:  # no kernel here
                    self.unsupported[n.target] = first_line(error)
            return value

        run = NodeTap(graph, graph.graph.nodes, observe)
        run.extra_traceback = False  # fx would append its node to the message of StageFailed
        return run

    def choose(self, graph: fx.GraphModule) -> set[fx.Node]:
        """Return the operators that compute in half precision."""
        chosen = set()
        for node in graph.graph.nodes:
            name = operator_name(node)
            if not is_convertible(node) or name in ANY_DTYPE or is_excluded(node, self.exclude):
                continue
            # Casts, and a softmax with a dtype, ask for float32 themselves.
            if name in SENSITIVE or torch.float32 in [*node.args, *node.kwargs.values()]:
                self.sensitive[name] += 1
            elif reasons := self._reasons_for_float32(node):
                self.out_of_range |= reasons
            else:
                chosen.add(node)
        return chosen

    def _reasons_for_float32(self, node: fx.Node) -> dict[str, str]:
        if node.target in self.unsupported:
            return {describe_tensor(node): self.unsupported[node.target]}
        limit = torch.finfo(self.dtype).max
        for scalar in node.args:
            if isinstance(scalar, float) and limit < abs(scalar) < float("inf"):
                return {describe_tensor(node): f"computes with {scalar:.3g}"}
        return {
            describe_tensor(tensor): reason
            for tensor in (node, *node.all_input_nodes)
            if tensor in self.statistics
            if (reason := self.statistics[tensor].reason_for_float32(self.dtype, self.headroom))
        }


def convert_precision(
    module: torch.nn.Module,
    signature: Signature,
    converter: PrecisionConverter,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> ExportedProgram:
    """Return the module as a graph that holds weights and computes in half precision.

    Inputs and outputs keep their types. After Micikevicius et al., "Mixed Precision Training"
    (2018), with ranges measured on data, which is read twice, in addition to a list of operators.
    `report` is called with the number of samples read so far. StageFailed where no operator can
    compute in half precision, the data does not fit the signature, or a value is NaN.
    """
    graph = capture(module, signature)
    fold_batch_norms_(graph)
    name_inputs_(graph, signature)
    measure = converter.measuring_run(graph)
    samples = 0
    with torch.inference_mode():
        for batch in batches:
            require_matching_inputs(batch.inputs, signature)
            measure.run(*batch.inputs)
            samples += len(batch)
            report(samples)
    chosen = converter.choose(graph)
    if not chosen:
        reasons = "; ".join(f"{name} {why}" for name, why in converter.out_of_range.items())
        raise StageFailed(
            f"no operator can compute in {str(converter.dtype).removeprefix('torch.')} "
            f"({reasons or 'all are excluded or need float32'})"
        )
    converter.converted = compute_in_half_(graph, chosen, converter.dtype)

    def refuse_nan(node: fx.Node, _: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.isnan().any():
            raise StageFailed(
                f"{describe_tensor(node)} is NaN in half precision; name its module in `exclude`, "
                "or raise `headroom`"
            )
        return value

    check = NodeTap(graph, graph.graph.nodes, refuse_nan)
    check.extra_traceback = False  # as above
    with torch.inference_mode():
        for batch in batches:
            check.run(*batch.inputs)
            samples += len(batch)
            report(samples)
    remove_unread_tensors_(graph)
    return program_of_graph(graph, signature)


def compute_in_half_(
    graph: fx.GraphModule, chosen: set[fx.Node], dtype: torch.dtype
) -> Counter[str]:
    """Compute operators in half precision, hold their weights in it, and count them by kind."""
    in_half: set[fx.Node] = set()
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    halves: dict[torch.Tensor, torch.nn.Parameter] = {}  # each shared by all names of a weight

    def is_read_in_half(tensor: fx.Node) -> bool:
        return any(
            reader in chosen or (operator_name(reader) in ANY_DTYPE and is_read_in_half(reader))
            for reader in tensor.users
        )

    def cast_inputs_(node: fx.Node, wanted: torch.dtype) -> None:
        for source in node.all_input_nodes:
            if is_float(source) and (source in in_half) != (wanted is dtype):
                if (source, wanted) not in casts:
                    with graph.graph.inserting_before(node):
                        cast = graph.graph.call_function(aten.to.dtype, (source, wanted))
                    cast.meta |= {k: v for k, v in source.meta.items() if k != "val"}
                    casts[source, wanted] = cast
                node.replace_input_with(source, casts[source, wanted])

    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and is_float(node) and is_read_in_half(node):
            owner, _, name = str(node.target).rpartition(".")
            module = graph.get_submodule(owner)
            tensor = getattr(module, name)
            if tensor.dtype is torch.float32:  # not converted through another node yet
                half = torch.nn.Parameter(tensor.detach().to(dtype), requires_grad=False)
                delattr(module, name)
                module.register_parameter(name, halves.setdefault(tensor, half))
            in_half.add(node)
        elif node.target is operator.getitem or operator_name(node) in ANY_DTYPE:
            if node.all_input_nodes[0] in in_half and _returns_float32(node):
                in_half.add(node)
        elif node in chosen:
            cast_inputs_(node, dtype)
            in_half.add(node)
        elif node.op in ("call_function", "output"):
            cast_inputs_(node, torch.float32)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Counter(operator_name(node) for node in chosen)


def is_convertible(node: fx.Node) -> bool:
    """Whether a node is an operator from float32 tensors to float32 ones."""
    if node.op != "call_function" or not str(node.target).startswith("aten."):
        return False
    reads = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    floats = [n for n in reads if n.meta["val"].is_floating_point()]
    return bool(floats) and all(map(is_float, floats)) and _returns_float32(node)


def _returns_float32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(v, torch.Tensor) and v.dtype is torch.float32 for v in values)


def operator_name(node: fx.Node) -> str:
    """Return an ATen operator's name without namespace, overload and the in-place underscore."""
    parts = str(node.target).split(".")
    return parts[1].rstrip("_") if node.op == "call_function" and len(parts) > 2 else ""
