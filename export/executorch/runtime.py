"""Lower programs for ExecuTorch's XNNPACK backend, and run them with the `executorch` wheel."""

from __future__ import annotations

import logging
import math
import os
import re
import struct
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch._decomp import get_decompositions

from compress.common.errors import ArtifactInvalid, StageFailed, first_line, raised_as
from compress.common.signature import AxisBounds, Signature
from compress.export.common.compiled_code import checked, in_parts
from compress.export.common.macs import count_macs, operator_of
from compress.export.common.runtime import SIGNED_8_BITS, kernel_facts, refuse_unrolled_rnn
from compress.export.parity.bisect import module_of
from compress.graph.torch_export import axis_limits, reshape_views_, trace

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.fx import Node


@contextmanager
def quiet_library() -> Iterator[None]:
    """Drop warnings about executorch's own code in a block, and keep the log's handlers."""
    # Its XNNPACK partitioner (1.5.1) calls logging.basicConfig when it is imported.
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            root.setLevel(level)
            for handler in [h for h in root.handlers if h not in handlers]:
                root.removeHandler(handler)


def planned_sizes(
    program: ExportedProgram, signature: Signature, largest_batch: int
) -> dict[str, list[int]]:
    """Return the smallest and largest size of each axis; StageFailed where nothing bounds one."""
    limits, sizes = axis_limits(program, signature), {}
    for name in signature.dynamic_axes:
        bounds = signature.bounds(name)
        known = [size for size in (bounds.max, limits.get(name)) if size is not None]
        if name == signature.batch_axis:
            known = [largest_batch]
        if not known:
            raise StageFailed(
                f"axis {name!r} has no largest size, for which ExecuTorch plans memory; declare "
                f"it, for example model.axes: {{{name}: {{max: 128}}}}"
            )
        sizes[name] = [bounds.min, min(known)]
    return sizes


def bounded_signature(signature: Signature, sizes: Mapping[str, Sequence[int]]) -> Signature:
    """Return a signature with bounds for every named axis; one that has a single size is fixed."""
    fixed = {name: least for name, (least, most) in sizes.items() if least == most}
    axes = {
        n: AxisBounds(min=least, max=most) for n, (least, most) in sizes.items() if n not in fixed
    }
    inputs = tuple(
        spec.model_copy(update={"shape": tuple(fixed.get(str(axis), axis) for axis in spec.shape)})
        for spec in signature.inputs
    )
    return signature.model_copy(update={"inputs": inputs, "axes": axes})


Tensors = tuple[torch.Tensor, ...]
EXECUTION_PLANS, DELEGATES = 1, 7
"""Numbers of fields in the tables of a program and of a plan (schema/program.fbs of 1.5)."""
BACKEND = b"XnnpackBackend"
NO_KERNEL = re.compile(r"kernel '([\w:.]+)' not found")
"""Printed by the runtime for an operator of a program that it cannot run."""


def load(
    file: Path, signature: Signature, sizes: Mapping[str, Sequence[int]], threads: int
) -> Callable[..., Tensors]:
    """Return a function that runs a file made for some smallest and largest `sizes` of named axes.

    Larger batches are answered in parts, and other sizes refused.
    """
    # The runtime takes any sizes with as many elements as were planned, and reads the memory of
    # inputs of other types.
    bounded = bounded_signature(signature, sizes)
    run = checked(ExecuTorchProgram(file, threads), bounded)
    batch = signature.batch_axis
    return run if batch is None else in_parts(run, signature, sizes[batch][1])


def refuse_other_backends(file: Path) -> None:
    """Raise ArtifactInvalid for a program whose parts another backend than XNNPACK would compute.

    The wheel has more: Qualcomm's loads the library of which the program gives the path.
    """
    from flatbuffers.encode import Get
    from flatbuffers.number_types import UOffsetTFlags
    from flatbuffers.table import Table

    def inner(table: Any, field: int) -> Iterator[Any]:
        offset = table.Offset(4 + 2 * field)
        for i in range(table.VectorLen(offset) if offset else 0):
            yield Table(content, table.Indirect(table.Vector(offset) + 4 * i))

    try:
        with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            program = Table(content, Get(UOffsetTFlags.packer_type, content, 0))
            backends = [
                bytes(delegate.String(delegate.Pos + delegate.Offset(4)))
                for plan in inner(program, EXECUTION_PLANS)
                for delegate in inner(plan, DELEGATES)
            ]
    except (OSError, ValueError, struct.error) as error:
        raise ArtifactInvalid(f"{file}: not an ExecuTorch program ({first_line(error)})") from error
    for backend in backends:
        if backend != BACKEND:
            raise ArtifactInvalid(
                f"{file}: has parts for {backend.decode(errors='replace')}, which may load other "
                "libraries; only XNNPACK is run"
            )


class ExecuTorchProgram:
    """A loaded `.pte` file, which runs with a number of threads."""

    def __init__(self, file: Path, threads: int) -> None:
        self.file = file
        self.threads = threads
        self._method: Any = None
        self._pool = 0
        self._load()

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the outputs, in memory of their own."""
        if self._pool != ThreadPool.generation:
            self._load()
        tensors = [x.contiguous() for x in inputs]
        try:
            return tuple(self._method.execute(tensors))
        except RuntimeError as error:
            # The reason is printed, not raised: run once more to catch it.
            with _captured_stderr() as printed:
                with suppress(RuntimeError):
                    self._method.execute(tensors)
                reason = _read(printed).rpartition("\n")[2].strip()
            raise RuntimeError(f"{first_line(error)}: {reason}") from error

    def _load(self) -> None:
        refuse_other_backends(self.file)
        with quiet_library(), _captured_stderr() as printed:
            from executorch.runtime import Runtime

            ThreadPool.resize(self.threads)
            self._pool = ThreadPool.generation
            try:
                self._program = Runtime.get().load_program(self.file)
                self._method = self._program.load_method("forward")
            except RuntimeError as error:
                reason = _read(printed)
                last = reason.rpartition("\n")[2].strip()
                problem = (
                    "not an ExecuTorch program that this runtime can load, or truncated "
                    f"({first_line(error)}; {last})"
                )
                if missing := sorted({*NO_KERNEL.findall(reason)}):
                    kernels = ", ".join(missing)
                    problem = f"ExecuTorch's runtime has no kernel for {kernels}; use export_onnx"
                raise ArtifactInvalid(f"{self.file}: {problem}") from error


class ThreadPool:
    """The runtime's threads, which all programs of the process share."""

    generation: int = 0
    """How often the pool was replaced. Programs loaded before still point to the old one."""

    @classmethod
    def resize(cls, threads: int) -> None:
        """Replace the pool by one of so many threads; nothing where it has them."""
        from executorch.extension.pybindings import portable_lib

        if portable_lib._threadpool_get_thread_count() != threads:
            portable_lib._unsafe_reset_threadpool(threads)
            cls.generation += 1


@contextmanager
def _captured_stderr() -> Iterator[IO[str]]:
    """Send what is printed in a block to a file: the runtime prints its reasons.

    It prints while it loads, and gives what it prints in a call to Python's `sys.stderr`.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        saved = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            with redirect_stderr(printed):
                yield printed
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _read(printed: IO[str]) -> str:
    printed.seek(0)
    return printed.read().rstrip()


aten = torch.ops.aten
SIZE_OPERATORS = {aten.sym_size.int}  # operators on sizes, for which no kernel runs


def describe_delegation(program: ExportedProgram) -> dict[str, Any]:
    """Return facts of a program after partitioning, in which a delegate is one call.

    `delegated_share` is XNNPACK's share of the multiply-accumulates, or of the operators where
    there are none. `portable_operators` has the others by the module that they belong to.
    `integer_kernels` and `float_kernels` count the operators that multiply matrices, and
    `integer_share` is the integer ones' share of the multiply-accumulates.
    """
    delegated = [
        node
        for name, module in program.graph_module.named_children()
        if name.startswith("lowered_module")
        for node in operators(module.original_module.graph)
    ]
    portable = list(operators(program.graph))
    by_module: dict[str, Counter[str]] = {}
    for node in portable:
        by_module.setdefault(module_of(node), Counter())[name_of(node)] += 1
    macs = {node: count for node in (*delegated, *portable) if (count := count_macs(node))}
    integer = {
        node
        for node in macs.keys() & delegated
        if "dequantize" in str(getattr(node.args[1], "target", ""))
    }
    in_integers, total = sum(macs[node] for node in integer), sum(macs.values())
    ours = sum(macs.get(node, 0) for node in delegated)
    theirs = total - ours
    if not ours + theirs:
        ours, theirs = len(delegated), len(portable)
    return {
        "integer_share": in_integers / total if total else None,
        "delegated_share": ours / (ours + theirs) if ours + theirs else 1.0,
        "delegated_operators": len(delegated),
        "portable_operators": {m: dict(sorted(by_module[m].items())) for m in sorted(by_module)},
        **kernel_facts(map(name_of, integer), map(name_of, macs.keys() - integer)),
    }


def operators(graph: torch.fx.Graph) -> Iterator[Node]:
    """Yield the nodes of a graph for which a kernel runs."""
    for node in graph.nodes:
        operator = operator_of(node)
        if isinstance(operator, torch._ops.OpOverload) and operator not in SIZE_OPERATORS:
            yield node


def name_of(node: Node) -> str:
    """Return an operator's name without its overload, as `aten.view_copy`."""
    return ".".join(str(operator_of(node)).split(".")[:2])


def replacements() -> dict[Any, Any]:
    """Return a table for `ExportedProgram.run_decompositions`: operator → function."""
    return {
        aten.scaled_dot_product_attention.default: attention,
        aten.gelu.default: gelu,
        aten.instance_norm.default: instance_norm,
        aten.adaptive_max_pool2d.default: adaptive_max_pool2d,
        aten.unsqueeze.default: unsqueeze,
        **get_decompositions([aten.tril_indices, aten.triu_indices]),
    }


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Write attention as two products and a softmax, which have kernels of XNNPACK.

    torch's own decomposition copies its inputs for a product of more than three axes, and would
    leave views to ExecuTorch that fit the strides of the fused kernel alone.
    """
    if query.dim() != 4 or key.shape[:2] != query.shape[:2] or enable_gqa:
        return NotImplemented
    rows, keys, values = (x.flatten(0, 1) for x in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.bmm(rows * factor, keys.transpose(1, 2))
    if is_causal:
        places = [torch.arange(x.shape[-2], device=query.device) for x in (query, key)]
        attn_mask = places[1] <= places[0][:, None]
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        scores = scores.view(*query.shape[:3], key.shape[2])
        if attn_mask.dtype == torch.bool:
            scores = torch.where(attn_mask, scores, -math.inf)
        else:
            scores = scores + attn_mask
        # Rows of which a mask leaves nothing give zeros, as torch's kernels do.
        is_empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.where(is_empty, 0.0, torch.softmax(scores, -1)).flatten(0, 1)
    mixed = torch.bmm(weights, values)
    return mixed.reshape(*query.shape[:3], value.shape[-1])


def gelu(x: Tensor, *, approximate: str = "none") -> Any:
    """Write the approximation by tanh out: XNNPACK (executorch 1.5.1) computes the exact GELU."""
    if approximate != "tanh":
        return NotImplemented
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Write normalisation by a sample's own statistics as operators that XNNPACK has kernels for.

    The portable kernel (executorch 1.5.1) gives infinite answers for channels of equal values.
    """
    if not use_input_stats:
        return NotImplemented
    positions = [*range(2, x.dim())]
    centred = x - x.mean(positions, keepdim=True)
    variance = (centred * centred).mean(positions, keepdim=True)
    normalized = centred * torch.rsqrt(variance + eps)
    shape = (1, -1, *[1] * len(positions))
    if weight is not None:
        normalized = normalized * weight.view(shape)
    return normalized if bias is None else normalized + bias.view(shape)


def adaptive_max_pool2d(x: Tensor, output_size: Sequence[int]) -> Any:
    """Write it as max pooling, where all windows have the same size."""
    sizes = x.shape[-2:]
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if any(size % out for size, out in zip(sizes, output_size, strict=True)):
        return NotImplemented
    window = [size // out for size, out in zip(sizes, output_size, strict=True)]
    return aten.max_pool2d_with_indices.default(x, window, window)


def unsqueeze(x: Tensor, dim: int) -> Any:
    """Write it as a view where a last axis is added to several that have no fixed size.

    XNNPACK's partitioner (executorch 1.5.1) takes it, and its preprocessing fails.
    """
    dynamic = sum(not isinstance(size, int) for size in x.shape)
    if dynamic < 2 or dim not in (-1, x.dim()):
        return NotImplemented
    return x.view(*x.shape, 1)


UNSIGNED = (torch.uint8, torch.uint16)


def lower(program: ExportedProgram, bounded: Signature) -> tuple[bytes, dict[str, Any]]:
    """Return the content of a `.pte` file, and facts of what XNNPACK computes of it.

    What XNNPACK has kernels for is delegated, and memory is planned for the largest sizes, which
    `bounded` has. Raise StageFailed where ExecuTorch has no kernel, or cannot bound a size.
    """
    rounding = [n for n in program.graph.nodes if str(n.target).startswith("quantized_decomposed.")]
    if any(dtype in node.args for node in rounding for dtype in UNSIGNED):
        raise StageFailed(SIGNED_8_BITS)
    refuse_unrolled_rnn(program, "ExecuTorch")
    with (
        raised_as(StageFailed, "ExecuTorch cannot lower the model"),
        quiet_library(),
        torch.no_grad(),
    ):
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import (
            EdgeCompileConfig,
            ExecutorchBackendConfig,
            to_edge_transform_and_lower,
        )

        program = trace(program.module(check_guards=False), bounded.example(), bounded)
        reshape_views_(program.graph_module)  # `attention` has other strides than torch's
        program = program.run_decompositions(replacements())
        merge_copies_(program)
        write_clamps_(program)
        # The check of the graph (executorch 1.5.1) takes the length of a tensor where an operator
        # gives several, which fixes the batch to the traced size.
        unchecked = EdgeCompileConfig(_check_ir_validity=False)
        edge = to_edge_transform_and_lower(
            program, partitioner=[XnnpackPartitioner()], compile_config=unchecked
        )
        lowered = edge.exported_program()
        restore_bounds_(lowered)
        delegation = describe_delegation(lowered)
        # The fusion gives quantized tables a kernel, which reads the rows that are looked up.
        config = ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True)
        return bytes(edge.to_executorch(config).buffer), delegation


def merge_copies_(program: ExportedProgram) -> None:
    """Keep one of several copies of a tensor."""
    # XNNPACK's preprocessing (executorch 1.5.1) drops copies, and fails where two of one tensor
    # leave a part.
    graph, copies = program.graph, dict[Any, Any]()
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        kept = copies.setdefault((node.args, str(node.kwargs)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    program.graph_module.recompile()


def write_clamps_(program: ExportedProgram) -> None:
    """Write clamps to constant limits as hardtanh, which XNNPACK fuses into the layer before."""
    # XNNPACK's partitioner (executorch 1.5.1) leaves an integer layer with a clamp to portable
    # kernels.
    for node in program.graph.find_nodes(op="call_function", target=aten.clamp.default):
        source: Any = node.args[0]
        limits = (*node.args[1:], None, None)[:2]
        if source.meta["val"].is_floating_point() and not node.kwargs:
            least, most = (
                end if limit is None else limit
                for limit, end in zip(limits, (-math.inf, math.inf), strict=True)
            )
            node.target, node.args = aten.hardtanh.default, (source, least, most)
    program.graph_module.recompile()


def restore_bounds_(program: ExportedProgram) -> None:
    """Give the sizes of a program their ranges back, for which memory is planned."""
    # torch's fake convolution (2.13) compares the batch with 16 to guess a memory format. From then
    # on the batch would be at most 15.
    for node in program.graph.nodes:
        value = node.meta.get("val")
        sizes: list[Any] = [*value.shape] if isinstance(value, torch.Tensor) else []
        for size in sizes:
            if isinstance(size, torch.SymInt):
                ranges = size.node.shape_env.var_to_range
                ranges |= {k: v for k, v in program.range_constraints.items() if k in ranges}
