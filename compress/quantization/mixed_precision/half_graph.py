"""A traced graph computed in half precision, where its numbers fit; the rest stays float32."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from compress.common.errors import StageFailed, first_line
from compress.graph.torch_export import export_program
from compress.quantization.mixed_precision.insert_casts import (
    PASSING,
    compute_in_half_,
    is_convertible,
    operator_name,
)
from compress.quantization.pt2e.module_names import is_excluded, name_inputs_, place
from compress.quantization.pt2e.torchao_api import fuse_conv_bn_
from compress.quantization.ptq.calibrate import drop_unread_tensors_, refuse_misfit, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
ATTENTION = aten.scaled_dot_product_attention.default


@dataclass
class Numbers:
    """What one tensor of the graph held on the sample, and what half precision makes of it."""

    largest: float = 0.0
    squares: float = 0.0
    squared_errors: float = 0.0

    def see(self, values: torch.Tensor, dtype: torch.dtype, largest: float = 0.0) -> None:
        """Take account of more values; infinite ones are the same in every precision."""
        finite = values[values.isfinite()].double()
        rounded = finite.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).double()
        peak = float(finite.abs().max()) if finite.numel() else 0.0
        self.largest = max(self.largest, peak, largest)
        self.squares += float(finite.square().sum())
        self.squared_errors += float((finite - rounded).square().sum())

    def misfit(self, dtype: torch.dtype, headroom: float) -> str | None:
        """Return why the values cannot be held in half precision, or None."""
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
    """Decides which operators compute in half precision; knows afterwards which do not, and why."""

    dtype: torch.dtype
    headroom: float
    exclude: tuple[str, ...] = ()
    numbers: dict[fx.Node, Numbers] = field(default_factory=dict)
    """What each float32 tensor of the graph held."""
    without_kernel: dict[Any, str] = field(default_factory=dict)
    """Operator that torch cannot compute in half precision here → what it says."""
    converted: Counter[str] = field(default_factory=Counter)
    """Number of operators in half precision by kind."""
    sensitive: Counter[str] = field(default_factory=Counter)
    """Number of operators left in float32 for their kind."""
    misfits: dict[str, str] = field(default_factory=dict)
    """Tensor or operator left in float32 → why."""

    def choose(self, graph: fx.GraphModule) -> set[fx.Node]:
        """Return the operators that compute in half precision."""
        return {
            node
            for node in graph.graph.nodes
            if is_convertible(node) and operator_name(node) not in PASSING
            if not is_excluded(node, self.exclude)
            if not self._is_sensitive(node) and self._fits(node)
        }

    def _is_sensitive(self, node: fx.Node) -> bool:
        name = operator_name(node)
        asks_for_float32 = torch.float32 in [*node.args, *node.kwargs.values()]
        if name in SENSITIVE or asks_for_float32:
            self.sensitive[name] += 1
            return True
        return False

    def _fits(self, node: fx.Node) -> bool:
        if node.target in self.without_kernel:
            self.misfits[place(node)] = self.without_kernel[node.target]
            return False
        limit = torch.finfo(self.dtype).max
        scalars = [a for a in node.args if isinstance(a, float) and limit < abs(a) < float("inf")]
        if scalars:
            self.misfits[place(node)] = f"computes with {scalars[0]:.3g}"
            return False
        reasons = {
            place(tensor): self.numbers[tensor].misfit(self.dtype, self.headroom)
            for tensor in (node, *node.all_input_nodes)
            if tensor in self.numbers
        }
        found = {where: why for where, why in reasons.items() if why is not None}
        self.misfits |= found
        return not found


def convert_precision(
    module: torch.nn.Module,
    signature: Signature,
    converter: PrecisionConverter,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> ExportedProgram:
    """Return the module as a graph that holds weights and computes in half precision.

    Inputs and outputs keep their types. After Micikevicius et al., "Mixed Precision Training"
    (2018), and with ranges looked at on data instead of a list of operators alone.

    Args:
        module: a module in eval mode; it is not changed.
        signature: its interface.
        converter: which operators stay float32.
        batches: inputs on which every tensor's numbers are looked at, read twice; one batch at a
            time is held in memory.
        report: called with the number of samples of each batch.

    Raises:
        StageFailed: no operator can compute in half precision, the data does not fit the signature,
            or a number is not finite; the message names the place.
    """
    graph = traced(module, signature)
    fuse_conv_bn_(graph)
    name_inputs_(graph, signature)
    look(graph, signature, converter, batches, report)
    chosen = converter.choose(graph)
    if not chosen:
        reasons = "; ".join(f"{name} {why}" for name, why in converter.misfits.items())
        raise StageFailed(
            f"no operator can compute in {str(converter.dtype).removeprefix('torch.')} "
            f"({reasons or 'all are excluded or need float32'})"
        )
    converter.converted = compute_in_half_(graph, chosen, converter.dtype)
    refuse_overflow(graph, batches, report)
    drop_unread_tensors_(graph)
    return export_program(graph, signature)


@torch.inference_mode()
def look(
    graph: fx.GraphModule,
    signature: Signature,
    converter: PrecisionConverter,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> None:
    """Run batches through a float32 graph and note what numbers each tensor holds.

    Raises:
        StageFailed: the data does not fit the signature, or a tensor is NaN.
    """
    looking = _Looking(graph, converter)
    for batch in batches:
        refuse_misfit(batch.inputs, signature)
        looking.run(*batch.inputs)
        report(len(batch))


class _Looking(fx.Interpreter):
    """Runs a graph, looks at every float32 tensor, and tries each kind of operator in half."""

    def __init__(self, graph: fx.GraphModule, converter: PrecisionConverter) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.converter = converter
        self.tried: set[Any] = set()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        known = self.converter.numbers
        if n.op == "get_attr":
            n.meta.setdefault("val", value)  # folding BatchNorm adds biases without it
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
            if value.isnan().any():
                raise StageFailed(f"{place(n)} is NaN in float32 already; mend data or weights")
            if n.op != "get_attr" or n not in known:
                numbers = known.setdefault(n, Numbers())
                numbers.see(value, self.converter.dtype, self._scores(n))
        if is_convertible(n) and n.target not in self.tried:
            self._try(n)
        return value

    def _scores(self, n: fx.Node) -> float:
        """Return a bound of the products inside attention, by Cauchy and Schwarz; 0 elsewhere."""
        if n.target is not ATTENTION:
            return 0.0
        (query, key, *_), given = self.fetch_args_kwargs_from_env(n)
        scale = given.get("scale") or query.shape[-1] ** -0.5
        return float(query.norm(dim=-1).max() * key.norm(dim=-1).max() * scale)

    def _try(self, n: fx.Node) -> None:
        self.tried.add(n.target)

        def lowered(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.dtype is torch.float32
            return value.to(self.converter.dtype) if is_float else value

        arguments: Any = map_aggregate(self.fetch_args_kwargs_from_env(n), lowered)
        try:
            n.target(*arguments[0], **arguments[1])  # type: ignore[operator]  # an aten operator
        except (RuntimeError, NotImplementedError) as error:
            self.converter.without_kernel[n.target] = first_line(error)


@torch.inference_mode()
def refuse_overflow(
    graph: fx.GraphModule, batches: Iterable[Batch], report: Callable[[int], None]
) -> None:
    """Run batches through a converted graph.

    Raises:
        StageFailed: an activation is NaN; the message names the place.
    """
    checking = _Checking(graph)
    for batch in batches:
        checking.run(*batch.inputs)
        report(len(batch))


class _Checking(fx.Interpreter):
    """Runs a graph and refuses what is no number."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.isnan().any():
            raise StageFailed(
                f"{place(n)} is NaN in half precision; name its module in `exclude`, or raise "
                "`headroom`"
            )
        return value
