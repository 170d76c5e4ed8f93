"""torch.export programs: traced from modules, saved reproducibly, loaded without running code."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import math
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor and its kin
from torch import nn
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.pt2_archive import PT2ArchiveReader
from torch.export.pt2_archive._package import load_pt2
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._sympy.numbers import int_oo

from compress.checkpoint.pt2_safety import GRAPH, SAMPLE_INPUTS, find_code
from compress.checkpoint.safe_zip import refuse_bomb
from compress.common.counts import count
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.foreign.patching import patched_attribute
from compress.common.forward import (
    batched_experts,
    copy_module,
    flatten_outputs,
    plain_attention,
)
from compress.common.signature import EXAMPLE_LENGTH, TABLE_ROWS, Signature
from compress.graph.constant_numbers import ConstantNumbers
from compress.graph.library_cache import (
    cached_deserialization,
    cheap_shape_cache,
    unchecked_serialization,
)

if TYPE_CHECKING:
    from torch.export import Dim, ExportedProgram

logger = logging.getLogger(__name__)
aten = torch.ops.aten
SAME_NUMBERS = {
    *(aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default),
    *(aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten._assert_tensor_metadata.default, aten.flatten.using_ints),
}
"""Operators between an input of ids and the table that is looked up: they change no number."""
# torch.export's error where a graph is valid for some sizes of an axis only, and the bound that it
# suggests: both exist as text alone.
SOME_SIZES = re.compile(r"in the specified range (\S.* )?satisfy the generated guard")
INNER_SIZE = re.compile(r"generated guard .* // \d+\)+ != 1")
DATA_DEPENDENT = re.compile(r"data.dependent", re.IGNORECASE)
LONGER = 8  # times an axis is in a second example
LARGEST = re.compile(r"^ *(\w+) = Dim\('\1', (?:min=\d+, )?max=(\d+)\)$", re.MULTILINE)

TORCH, OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
LOOP = re.compile(r"(for|while)\b|.*\brange\(")


def export_program(module: nn.Module, signature: Signature) -> ExportedProgram:
    """Trace a module in eval mode, unchanged, into an ATen graph whose named axes are dynamic.

    An axis that the model's code bounds, as a table of positions does, is dynamic up to that size;
    StageFailed where the code fixes it. Outputs are flattened into the order of the signature.
    """
    inputs = signature.example()
    module = without_parametrizations(module)
    with (
        torch.no_grad(),
        plain_attention(),
        batched_experts(),
        warnings.catch_warnings(),
        _no_stderr_on_failure(),
        _record_specializations() as locations,
    ):
        # LSTM and GRU have a second list of their weights, which tracing swaps and restores.
        warnings.filterwarnings("ignore", message=r"The tensor attributes? self\.\S*_flat_weights")
        # torch 2.15 calls it in its own form of LSTM layers.
        warnings.filterwarnings("ignore", "_check_is_size will be removed", FutureWarning)
        try:
            return trace(with_flat_outputs(module, inputs), inputs, signature)
        except Exception as error:
            reason = _explain_failure(error, locations)
            parts = module.named_modules()
            if path := next((k for k, x in parts if isinstance(x, torch.jit.ScriptModule)), ""):
                reason = f"{path} is TorchScript; build it from its Python class ({reason})"
            raise StageFailed(f"torch.export cannot trace the model: {reason}") from error


def trace(
    module: nn.Module, inputs: Sequence[torch.Tensor], signature: Signature
) -> ExportedProgram:
    """Trace a module with the signature's axes dynamic, up to the size that its code supports."""
    try:
        with _no_stderr_on_failure():
            program = _trace(module, inputs, signature)
    except Exception as error:
        if DATA_DEPENDENT.search(str(error)):
            again = _trace_with_constants(module, inputs, signature)
            if again is not None:
                return again
        raise
    if program.graph.find_nodes(op="call_function", target=aten.item.default):
        return _trace_with_constants(module, inputs, signature) or program
    return program


def _trace_with_constants(
    module: nn.Module, inputs: Sequence[torch.Tensor], signature: Signature
) -> ExportedProgram | None:
    """Trace a module with numbers of its own tensors as constants; None where it reads none."""
    with ConstantNumbers(module) as numbers, contextlib.suppress(Exception):
        program = _trace(module, inputs, signature)
        return program if numbers.count else None
    return None


def _trace(
    module: nn.Module, inputs: Sequence[torch.Tensor], signature: Signature
) -> ExportedProgram:
    first = next(iter(inspect.signature(module.forward).parameters.values()), None)

    def export(
        inputs: Sequence[torch.Tensor],
        limits: dict[str, int],
        above: Mapping[str, int] = MappingProxyType({}),
        *,
        checks: bool = False,
    ) -> ExportedProgram:
        shapes: Any = dynamic_shapes(signature, limits, above)
        if first is not None and first.kind is inspect.Parameter.VAR_POSITIONAL:
            shapes = {first.name: shapes}
        count("traces")
        return torch.export.export(
            module,
            tuple(inputs),
            dynamic_shapes=shapes,
            prefer_deferred_runtime_asserts_over_guards=checks,
        )

    with any_sequence_length(), cheap_shape_cache():
        try:
            return export(inputs, {})
        except torch._dynamo.exc.UserError as error:
            if not SOME_SIZES.search(str(error)):
                raise
            limits = {axis: int(most) for axis, most in LARGEST.findall(str(error))}
            has_inner_sizes = INNER_SIZE.search(str(error)) is not None
        limits.pop(signature.batch_axis or "", None)  # no model means a bound of its batch
        largest = max(limits.values(), default=math.inf)
        if largest <= LONGER * EXAMPLE_LENGTH and (has_inner_sizes or largest < 2 * EXAMPLE_LENGTH):
            # An inner size that is 1 in the example is taken for 1: (width - 1) // 8 + 1 == 1 up to
            # 8. Where the model takes more, a larger example has no such sizes. Larger limits are
            # more likely those of the model's own code, such as a branch on the length.
            sizes = {axis: signature.bounds(axis).nearest(LONGER * n) for axis, n in limits.items()}
            longer = signature.example(sizes=sizes)
            with contextlib.suppress(Exception):
                module(*longer)
                return export(longer, {}, limits, checks=True)
        # Guards such as (width - 1) // 2 + 1 != 1, which torch.export cannot solve for a range,
        # become runtime assertions.
        return export(inputs, limits, checks=True)


@contextlib.contextmanager
def any_sequence_length() -> Iterator[None]:
    """Let fake tensors pass recurrent layers without the loop over the steps.

    Only for traces that keep these layers as nodes: decomposed, they would have the right shapes
    and meaningless values.
    """
    # PyTorch infers the output shapes of `aten.lstm`, `aten.gru` and the like by running the loop
    # over the steps, which fixes their number; but the shapes follow from those of the states.
    compute_layer: Any = decompositions.one_layer_rnn
    select_lstm: Any = decompositions.select_one_layer_lstm_function

    def one_layer_rnn(inp: torch.Tensor, hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if isinstance(inp, FakeTensor):
            return _repeat_over_steps(hidden, inp), hidden.clone()
        return compute_layer(inp, hidden, *rest, **more)

    def one_layer_lstm(
        inp: torch.Tensor, hidden: tuple[torch.Tensor, ...], *_: Any, **__: Any
    ) -> Any:
        return _repeat_over_steps(hidden[0], inp), tuple(state.clone() for state in hidden)

    def select(inp: torch.Tensor, hx: Any, params: Any) -> Any:
        return one_layer_lstm if isinstance(inp, FakeTensor) else select_lstm(inp, hx, params)

    with (
        patched_attribute(decompositions, "one_layer_rnn", one_layer_rnn),
        patched_attribute(decompositions, "select_one_layer_lstm_function", select),
    ):
        yield


def _repeat_over_steps(state_BH: torch.Tensor, inputs_TBI: torch.Tensor) -> torch.Tensor:
    return state_BH.expand(inputs_TBI.shape[0], *state_BH.shape).clone()


def dynamic_shapes(
    signature: Signature,
    limits: Mapping[str, int] = MappingProxyType({}),
    above: Mapping[str, int] = MappingProxyType({}),
) -> tuple[dict[int, Dim] | None, ...]:
    """Return the dynamic axes of each input, as torch.export's ``dynamic_shapes``.

    Sizes are within the signature's bounds, at most `limits` and larger than `above`.
    """
    sizes = {}
    for name in signature.dynamic_axes:
        declared = signature.bounds(name)
        bounds = [size for size in (declared.max, limits.get(name)) if size is not None]
        parts = declared.multiple
        # torch.export assumes sizes of at least 2.
        least = max(declared.min, above.get(name, 0) + 1)
        smallest = -(-least // parts) if least > 1 else None
        largest = min(bounds) // parts if bounds else None
        if parts == 1:
            sizes[name] = torch.export.Dim(name, min=smallest, max=largest)
        else:
            sizes[name] = parts * torch.export.Dim(f"{name}_parts", min=smallest, max=largest)
    return tuple(
        {axis: sizes[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)} or None
        for spec in signature.inputs
    )


def axis_limits(program: ExportedProgram, signature: Signature) -> dict[str, int]:
    """Return the largest size of each dynamic axis that is bounded, as the graph has it."""
    inputs = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    limits = {}
    for spec, name in zip(signature.inputs, program.graph_signature.user_inputs, strict=True):
        for axis, size in zip(spec.shape, inputs[str(name)].meta["val"].shape, strict=True):
            if isinstance(axis, str) and isinstance(size, torch.SymInt):
                bounds = program.range_constraints.get(size.node.expr)
                if bounds is not None and bounds.upper is not int_oo and bounds.upper < 2**31:
                    limits[axis] = int(bounds.upper)
    return limits


def input_limit_facts(program: ExportedProgram, signature: Signature, title: str) -> dict[str, Any]:
    """Return what a graph's inputs are limited to, as an artifact's facts.

    These are the largest sizes of axes, of which the undeclared are logged as the stage `title`,
    and the rows of the tables that ids look up.
    """
    limits = axis_limits(program, signature)
    for axis, largest in limits.items():
        if largest != signature.bounds(axis).max:
            logger.info("%s: the model's code takes %s of at most %d", title, axis, largest)
    inputs = dict(zip(program.graph_signature.user_inputs, signature.inputs, strict=True))
    rows: dict[str, int] = {}
    for node in program.graph.find_nodes(op="call_function", target=aten.embedding.default):
        table, ids = node.args[:2]
        while ids.op == "call_function" and ids.target in SAME_NUMBERS:
            ids = ids.args[0]
        if ids.name in inputs:
            name, length = inputs[ids.name].name, int(table.meta["val"].shape[0])
            rows[name] = min(rows.get(name, length), length)
    facts = {"axis_limits": limits, TABLE_ROWS: rows}
    return {name: found for name, found in facts.items() if found}


def without_parametrizations(module: nn.Module) -> nn.Module:
    """Return a module whose weights are computed once, where each call computes them.

    What parametrizations compute, or the hooks of ``torch.nn.utils.weight_norm``, ``spectral_norm``
    and ``prune``, is then a plain parameter, which can be quantized.
    """
    if not any(parametrize.is_parametrized(p) or _weight_hooks(p) for p in module.modules()):
        return module
    plain = copy_module(module)
    for part in plain.modules():
        for key, hook in _weight_hooks(part).items():
            hook.remove(part)
            del part._forward_pre_hooks[key]
    for part in [p for p in plain.modules() if parametrize.is_parametrized(p)]:
        names: Any = part.parametrizations
        weights = {name: getattr(part, name).detach().clone() for name in names}
        # torch's own function would take the weights from the class, which the module shares.
        part.__class__ = type(part).__bases__[0]
        del part.parametrizations
        for name, weight in weights.items():
            part.register_parameter(name, nn.Parameter(weight, weight.is_floating_point()))
    return plain


def _weight_hooks(part: nn.Module) -> dict[int, Any]:
    """Return those of a part's hooks that compute one of its weights before each call."""
    kinds = (WeightNorm, SpectralNorm, BasePruningMethod)
    return {key: h for key, h in part._forward_pre_hooks.items() if isinstance(h, kinds)}


@contextlib.contextmanager
def _no_stderr_on_failure() -> Iterator[None]:
    """Drop what is printed where tracing fails: torch prints the graph so far, and then raises."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.ExitStack() as restore:
        # Its handler holds the stream that was stderr when torch was imported.
        for handler in logging.getLogger("torch.fx.experimental.symbolic_shapes").handlers:
            if type(handler) is logging.StreamHandler:
                restore.callback(handler.setStream, handler.setStream(printed))
        yield
    sys.stderr.write(printed.getvalue())


@contextlib.contextmanager
def _record_specializations() -> Iterator[dict[int, traceback.FrameSummary]]:
    """Record the line of the model's code at which a symbolic size became each number."""
    locations: dict[int, traceback.FrameSummary] = {}
    # torch.export's error does not name the line. A private method of torch 2.13; where a release
    # does not have it, nothing is recorded.
    original: Any = getattr(ShapeEnv, "_set_replacement", None)

    def record(self: ShapeEnv, symbol: Any, value: Any, *rest: Any, **more: Any) -> Any:
        if getattr(value, "is_Integer", False):
            stack = traceback.extract_stack()
            frames = [f for f in stack if not f.filename.startswith((TORCH, OURS, "<"))]
            if frames:
                locations.setdefault(int(value), frames[-1])
        return original(self, symbol, value, *rest, **more)

    with patched_attribute(ShapeEnv, "_set_replacement", record):
        yield locations


def reshape_views_(graph: torch.fx.GraphModule) -> None:
    """Replace ``view`` by ``reshape`` in a graph, in place."""
    # A view exists for the strides that its input had in the trace. Kernels may return others: of
    # attention, PyTorch calls another one where the mask is a parameter, and none where it is
    # decomposed; convolutions follow the layout of their weight, and integer ones have their own.
    for view in (aten.view.default, aten._unsafe_view.default):
        for node in graph.graph.find_nodes(op="call_function", target=view):
            node.target = aten.reshape.default
    graph.recompile()


def move_program(program: ExportedProgram, device: str) -> ExportedProgram:
    """Move a program's weights, and the constants that it makes, to a device; return it."""
    from torch.export.passes import move_to_device_pass

    # With a number, as tensors have it: `cuda` is another device to a program's assertions.
    return move_to_device_pass(program, "cuda:0" if device == "cuda" else device)


def has_integer_operators(graph: torch.fx.Graph) -> bool:
    """Whether a graph quantizes or dequantizes tensors."""
    return any(str(node.target).startswith("quantized_decomposed.") for node in graph.nodes)


def with_flat_outputs(module: nn.Module, inputs: Sequence[torch.Tensor]) -> nn.Module:
    """Return the module, wrapped if it returns anything but a tensor or a tuple of tensors."""
    output = module(*inputs)
    if all(isinstance(t, torch.Tensor) for t in (output if type(output) is tuple else (output,))):
        return module
    flat = FlatOutputs(module)
    flat.training = False  # not by `eval`, which modules of programs refuse
    return flat


class FlatOutputs(nn.Module):
    """A module whose outputs are flattened to a tuple of tensors."""

    # TorchScript files hold the class's name: this one keeps their digests what they were.
    _jit_override_qualname = "__torch__.compress.core.program.FlatOutputs"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the wrapped module's outputs, flattened."""
        return flatten_outputs(self.module(*inputs))


@contextlib.contextmanager
def flat_outputs(module: nn.Module) -> Iterator[None]:
    """Flatten a module's outputs until the end of a block; its parameters keep their names."""
    original = module.forward
    own = {"forward": original} if "forward" in vars(module) else {}

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flatten_outputs(original(*inputs))

    # torch.export reads the parameters' names and number here.
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)  # an instance's own, such as a hook of accelerate's


def save_program(program: ExportedProgram, file: Path) -> None:
    """Write a program; equal programs give equal bytes on any machine and in any folder."""
    buffer = io.BytesIO()
    with unchecked_serialization():
        torch.export.save(program, buffer)
    buffer.seek(0)
    copy_plain_records(PT2ArchiveReader(buffer), file)


def copy_plain_records(reader: PT2ArchiveReader, file: Path) -> None:
    """Copy an archive's records, unchecked, without sample inputs, guards and stack traces.

    These name the author's folders; :func:`load_program` refuses the others.
    """
    with file.open("wb") as stream:
        writer = torch._C.PyTorchFileWriter(stream)
        writer.set_min_version(6)  # as torch's own writer of these archives does
        for name in sorted(n for n in reader.get_file_names() if not n.startswith(".data/")):
            if name == "byteorder":
                continue  # the writer adds it
            record = b"" if name == SAMPLE_INPUTS else reader.read_bytes(name)
            if name == GRAPH:
                record = _without_provenance(record)
            writer.write_record(name, record, len(record))
        writer.write_end_of_file()


def load_program(file: Path) -> ExportedProgram:
    """Load a program without running code from the file.

    ArtifactInvalid where it is truncated, or where a record or a string in it is anything but plain
    data: see :mod:`compress.checkpoint.pt2_safety`.
    """
    refuse_bomb(file)
    content = file.read_bytes()
    try:
        for danger in find_code(PT2ArchiveReader(io.BytesIO(content))):
            raise ArtifactInvalid(f"{file}: {danger}; it was not read")
        # Not torch.export.load: on an error it falls back to an older format, which is pickled.
        with cached_deserialization(), warnings.catch_warnings():
            # torch 2.11 makes tensors of `bytes` objects, which nothing else holds, and warns once
            # that these are read-only. In 2.13 the tensors have storage of their own.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return load_pt2(io.BytesIO(content)).exported_programs["model"]
    except ArtifactInvalid:
        raise
    except Exception as error:
        raise ArtifactInvalid(
            f"{file}: not a torch.export program that torch {torch.__version__} can read, or "
            f"truncated ({type(error).__name__}: {_first_sentence(error)})"
        ) from error


def _without_provenance(record: bytes) -> bytes:
    """Return a serialized graph without guards and the nodes' metadata (stack traces)."""
    graph = json.loads(record)
    graph["guards_code"] = []  # source code, which `load_program` refuses
    graphs = [graph["graph_module"]["graph"]]
    while graphs:
        for node in graphs.pop()["nodes"]:
            node["metadata"] = {}
            graphs += [
                i["arg"]["as_graph"]["graph"] for i in node["inputs"] if "as_graph" in i["arg"]
            ]
    return json.dumps(graph, separators=(",", ":")).encode()


def _explain_failure(error: Exception, locations: Mapping[int, traceback.FrameSummary]) -> str:
    """Reword torch.export's errors on dynamic axes: which axis, where, and what to declare."""
    text = str(error)
    fixed = re.search(
        r"You marked (\w+) as dynamic but your code specialized it .*?\((\d+)\)", text
    ) or re.search(r"guards generated for (\w+) = .* in a specialized value of (\d+)", text)
    if fixed:
        axis, size = fixed.groups()
        place = ""
        if line := locations.get(int(size)):
            loop = "; a loop in Python is written out" if LOOP.match(line.line or "") else ""
            place = f" ({Path(line.filename).name}, line {line.lineno}: {line.line}{loop})"
        return (
            f"axis {axis!r} is baked in: the model's code fixes it to {size}{place}; compute it "
            f"from the input's shape, or declare the number {size} instead of the name in "
            "model.inputs"
        )
    limited = re.search(
        r"Not all values of (\w+) = (\S+) in the specified range (?:\S.* )?satisfy the generated "
        r"guard (.+)",
        text,
    )
    if limited:
        axis, expression, guard = limited.groups()
        # torch.export assumes sizes of at least 2, so this bound is not the model's.
        limits = guard.rstrip(".").replace(expression, axis).removeprefix(f"2 <= {axis} and ")
        limits = limits.removesuffix(f" and {axis} <= IntInfinity()")
        smallest = re.search(rf"{axis} = Dim\('{axis}', min=(\d+)", text)
        bounds = f"declare model.axes: {{{axis}: {{min: {smallest[1]}}}}}, " if smallest else ""
        return (
            f"axis {axis!r} is declared dynamic and the model's code takes only some sizes, those "
            f"where {limits}; lift this limit, {bounds}or declare a number instead of the name in "
            "model.inputs"
        )
    return f"{type(error).__name__}: {_first_sentence(error)}"


def _first_sentence(error: Exception) -> str:
    return re.split(r"\n|\. ", str(error).strip())[0]
