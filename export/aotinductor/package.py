"""AOTInductor packages: programs rewritten into forms that it compiles right, compiled, loaded."""

from __future__ import annotations

import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers dequantize_per_channel and its kin
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.export.pt2_archive import PT2ArchiveReader
from torch.utils._pytree import tree_leaves

from compress.checkpoint.file_kinds import COMPILED, unreadable
from compress.checkpoint.safe_zip import refuse_bomb
from compress.common.errors import StageFailed, first_line
from compress.common.foreign.patching import patched_attribute
from compress.export.common.compiled_code import checked
from compress.export.common.macs import count_macs
from compress.export.common.runtime import NO_UINT16_KERNELS, kernel_facts, refuse_unrolled_rnn
from compress.graph.torch_export import move_program, reshape_views_

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

    from compress.common.signature import Signature

SETTINGS = {
    # Weights become constants, which is what lets Inductor pack them for its integer kernels.
    "freezing": True,
    # Otherwise the number of threads at the time of compiling is written into the code.
    "cpp.dynamic_threads": True,
    # Otherwise a test program is compiled for each instruction set, which takes longer than a
    # small model; those that the processor has are used either way.
    "cpp.vec_isa_ok": True,
    # The precompiled header would be written outside of the cache's folder, and stay.
    "aot_inductor.precompile_headers": False,
    "compile_threads": 1,
}
# A heavy operator in the generated C++, e.g. aoti_torch_cpu__qlinear_pointwise_tensor(.
CALL = re.compile(r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_(?:cpu|cuda)_+(\w+?)\(")
INTEGER_KERNEL = re.compile(r"qconv|qlinear|int_mm")
FLOAT_KERNEL = re.compile(r"(mkl(dnn)?_+)*(convolution|linear|(add|b|badd)?mm)")
SOURCE_SUFFIXES = (".cpp", ".cu")
DEQUANTIZE_TENSOR = "quantized_decomposed.dequantize_per_tensor"
CONVOLUTION = re.compile(r"aten\.conv(1d|2d|3d|olution)\.")


def compile_package(
    program: ExportedProgram, signature: Signature, file: Path, device: str
) -> dict[str, Any]:
    """Compile a program, rewritten in place; return its integer and float kernels.

    With them `integer_share`, the integer kernels' share of the multiply-accumulates, None where
    nothing is multiplied. Raise StageFailed where it cannot be compiled, or would give wrong
    answers.
    """
    from torch._inductor import aoti_compile_and_package, config
    from torch._inductor.codegen.cpp import CppVecOverrides
    from torch._inductor.utils import fresh_cache

    # Inductor (torch 2.13) hands 16-bit activations to 8-bit kernels.
    if any(torch.uint16 in node.args for node in program.graph.nodes):
        raise StageFailed(NO_UINT16_KERNELS)
    refuse_one_channel_integers(program)
    refuse_unrolled_rnn(program, "AOTInductor", kernels=("LSTM",))
    counted = PackAndCount()
    settings: dict[str, Any] = {**SETTINGS, "post_grad_custom_pre_pass": counted}
    if hasattr(config.aot_inductor, "enable_line_tables"):  # torch 2.11 writes no line tables
        # They name the folder that was compiled in, which would make two packages differ.
        settings["aot_inductor.enable_line_tables"] = False
    with (
        TemporaryDirectory(prefix="compress-aot-") as scratch,
        warnings.catch_warnings(),
        fresh_cache(dir=scratch),
    ):
        warnings.filterwarnings("ignore", module=r"torch\.")  # about Inductor's own code
        # torch 2.11 copies a graph for CUDA, for which Python's copyreg is blamed.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        package = Path(scratch) / file.name
        try:
            widen_ranges_(program)
            if device == "cpu":
                register_integer_patterns()
                merge_products_(program)
                make_contiguous_(program)
                check_indices_(program)
                multiply_rows_(program)
            else:
                program = move_program(program, device)
                settings["freezing"] = False  # it is for oneDNN's kernels
            program.graph_module.recompile()
            # A stored program has none.
            program._example_inputs = (tuple(signature.example(device=device)), {})
            exact = partial(patched_attribute, CppVecOverrides)  # near zero
            with (
                torch.no_grad(),
                config.patch(settings),
                # Inductor (torch 2.13) writes expm1, and so ELU, as exp(x) - 1, and atanh by
                # log(1 + x); the vector kernels of these names are exact near zero.
                exact("expm1", staticmethod(lambda x: f"{x}.expm1()")),
                exact("atanh", staticmethod(lambda x: f"{x}.atanh()")),
            ):
                aoti_compile_and_package(
                    program, package_path=str(package), inductor_configs=settings
                )
            return {**_without_sources(package, file), "integer_share": counted.integer_share}
        except Exception as error:  # noqa: BLE001 - raised below, once the cache is removed
            failure = error
    raise StageFailed(
        f"AOTInductor cannot compile the model: {type(failure).__name__}: {first_line(failure)}"
    ) from failure


def register_integer_patterns() -> None:
    """Let Inductor compile quantized graphs to kernels of integers, as torch 2.13 does itself."""
    from torch._inductor.fx_passes import quantization

    name = "_register_quantization_weight_pack_pass"
    if not hasattr(quantization, name):  # torch 2.15 left its patterns to torchao
        # The import of torchao's quantizer for x86 would also set a pass for all graphs of a user.
        from torchao.quantization.pt2e.inductor_passes import x86

        getattr(x86, name)()


def load(file: Path, signature: Signature, device: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that runs a package, and refuses other inputs than the signature's."""
    # The archive's sizes are checked first: the loader unpacks it to disk, whatever it holds.
    refuse_bomb(file)
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else -1
    try:
        # Not torch._inductor.aoti_load_package, which compiles test programs where no cache is.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", True, 1, index)
    except RuntimeError as error:
        raise unreadable(file, COMPILED, error) from error

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(loader.boxed_run([x.contiguous() for x in inputs]))

    return checked(run, signature)


def refuse_one_channel_integers(program: ExportedProgram) -> None:
    """Raise StageFailed for an integer convolution of one channel that has a dynamic axis."""
    # Inductor (torch 2.13) takes their results for contiguous, and oneDNN's kernel writes the
    # channels last: the code compiles, and its outputs are at chance.
    for node in program.graph.nodes:
        source = node.args[0] if CONVOLUTION.match(str(node.target)) else None
        if source is None or not str(source.target).startswith(DEQUANTIZE_TENSOR):
            continue
        shape = source.meta["val"].shape
        if shape[1] == 1 and not all(isinstance(size, int) for size in shape):
            raise StageFailed(
                "a convolution reads integers of one channel, and its input has a dynamic axis: "
                "AOTInductor compiles that into wrong answers; quantize with `target: "
                "inductor-cpu`, which leaves it in float, or `exclude` it"
            )


def _without_sources(package: Path, file: Path) -> dict[str, dict[str, int]]:
    """Copy a package with its C++ sources emptied; return the kernels that these call."""
    reader = PT2ArchiveReader(str(package))
    sources = []
    with file.open("wb") as stream:
        writer = torch._C.PyTorchFileWriter(stream)
        for name in sorted(n for n in reader.get_file_names() if not n.startswith(".data/")):
            record = reader.read_bytes(name)
            if name.endswith(SOURCE_SUFFIXES):
                sources.append(record.decode())
                record = b""  # torch 2.11 finds the package's metadata by the source's name
            if name != "byteorder":  # the writer adds it
                writer.write_record(name, record, len(record))
        writer.write_end_of_file()
    return count_kernels("\n".join(sources))


def count_kernels(source: str) -> dict[str, dict[str, int]]:
    """Return how many integer and float kernels a package's code calls for heavy operators."""
    calls = CALL.findall(source)
    return kernel_facts(filter(INTEGER_KERNEL.match, calls), filter(FLOAT_KERNEL.match, calls))


aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed
LINEAR = aten.linear.default
LOOKUPS = {
    aten.embedding.default: 1,
    aten.index.Tensor: 1,
    aten.index_select.default: 2,
    aten.gather.default: 2,
}
"""Operators that read by integers → which of their arguments holds these."""
CHOOSE = decomposed.choose_qparams.tensor
DEQUANTIZE = (decomposed.dequantize_per_tensor.default, decomposed.dequantize_per_tensor.tensor)
DEQUANTIZE_CHANNELS = decomposed.dequantize_per_channel.default
DEQUANTIZE_ROWS = decomposed.dequantize_per_token.default
MOVES = {aten.reshape.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default}


def merge_products_(program: ExportedProgram) -> None:
    """Merge integer products that read the same input (attention's Q, K, V) into one, in place."""
    # A call of oneDNN's kernel costs about as much as the product of a short sentence.
    by_input: dict[Any, list[Node]] = {}
    # Parts of a product lie in memory with gaps, which a view cannot always read.
    reshape_views_(program.graph_module)
    for node in program.graph.find_nodes(op="call_function", target=LINEAR):
        source, weight = node.args[:2]
        # The kernel fuses an operator such as an addition that follows: such products stay alone.
        only_moved = bool(node.users) and all(reader.target in MOVES for reader in node.users)
        if (
            only_moved
            and source.target in DEQUANTIZE
            and weight.target is DEQUANTIZE_CHANNELS
            and weight.args[3] == 0
            and all(given is None or given.op == "placeholder" for given in _constants(node))
        ):
            key = (source.target, source.args, weight.args[3:], _bias(node) is None)
            by_input.setdefault(key, []).append(node)
    for products in (group for group in by_input.values() if len(group) > 1):
        _merge_(program.graph, products)


def widen_ranges_(program: ExportedProgram) -> None:
    """Extend every range that is found at run time to include zero, in place."""
    # PyTorch's own choose_qparams does; Inductor's decomposition does not (torch 2.11 to 2.13), and
    # is far off where all values have one sign.
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=CHOOSE):
        with graph.inserting_before(node):
            smallest = _call(graph, aten.amin.default, node.args[0])
            largest = _call(graph, aten.amax.default, node.args[0])
            least = _call(graph, aten.clamp_max.default, smallest, 0)
            most = _call(graph, aten.clamp_min.default, largest, 0)
            ends = _call(graph, aten.stack.default, [least, most])
        node.update_arg(0, ends)


def make_contiguous_(program: ExportedProgram) -> None:
    """Copy integers that a product reads and that lie transposed, in place."""
    # Inductor has such products as bmm, and its check of their sizes raises TypeError where an axis
    # is dynamic (torch 2.13). torch's own attention transposes what it reads with batch_first.
    graph = program.graph
    for product in graph.find_nodes(op="call_function", target=LINEAR):
        floats: Any = product.args[0]
        if floats.target in DEQUANTIZE and not floats.meta["val"].is_contiguous():
            with graph.inserting_before(floats):
                copied = _call(graph, aten.clone.default, floats.args[0])
            copied.kwargs = {"memory_format": torch.contiguous_format}
            floats.update_arg(0, copied)


def check_indices_(program: ExportedProgram) -> None:
    """Let integers of the inputs that look up what is not there raise RuntimeError, in place."""
    # Inductor's own check raises within threads of OpenMP, which ends the process (torch 2.13).
    graph, names = program.graph, {*program.graph_signature.user_inputs}
    of_inputs: set[Node] = set()
    for node in graph.nodes:
        if node.name in names or of_inputs.intersection(node.all_input_nodes):
            of_inputs.add(node)
    for node in [node for node in graph.nodes if node.target in LOOKUPS]:
        read, place = node.args[0], LOOKUPS[node.target]
        several = node.target is aten.index.Tensor  # of which those below 0 count from the end
        axis = 0 if node.target is aten.embedding.default else node.args[1]
        given = dict(enumerate(node.args[1])) if several else {axis: node.args[place]}
        integers = {axis: index for axis, index in given.items() if index in of_inputs}
        if any(index.meta["val"].dtype == torch.bool for index in integers.values()):
            continue  # a mask may stand for several axes
        for axis, index in integers.items():
            rows = read.meta["val"].shape[axis]
            with graph.inserting_before(node):
                if not isinstance(rows, int):
                    rows = _call(graph, aten.sym_size.int, read, axis)
                most, least = _call(graph, operator.sub, rows, 1), 0
                if several:
                    least = _call(graph, operator.neg, rows)
                given[axis] = _call(graph, aten.clamp.default, index, least, most)
                equal = _call(graph, aten.eq.Tensor, index, given[axis])
                message = f"an integer that looks up a row of {read.name} is out of range"
                _call(graph, aten._assert_async.msg, _call(graph, aten.all.default, equal), message)
        node.update_arg(place, [*given.values()] if several else given[axis])


def multiply_rows_(program: ExportedProgram) -> None:
    """Multiply rows with scales of their own by integer weights with `_int_mm`, in place."""
    # Inductor has a pattern for one scale for all rows, and computes this form in floats.
    graph = program.graph
    for product in graph.find_nodes(op="call_function", target=LINEAR):
        rows, weight = product.args[:2]
        if (
            rows.target is not DEQUANTIZE_ROWS
            or weight.target is not DEQUANTIZE_CHANNELS
            or not all(n is None or n.op == "placeholder" for n in _constants(product))
        ):
            continue
        (integers, scale), bias = rows.args[:2], _bias(product)
        weight_OI, scale_O = weight.args[:2]
        with graph.inserting_before(product):
            size = integers.meta["val"].shape[-1]
            leading = [
                _call(graph, aten.sym_size.int, integers, axis)
                for axis in range(integers.meta["val"].dim() - 1)
            ]
            flat = _call(graph, aten.reshape.default, integers, [-1, size])
            weight_IO = _call(graph, aten.permute.default, weight_OI, [1, 0])
            sums = _call(graph, aten._int_mm.default, flat, weight_IO)
            outputs = weight_OI.meta["val"].shape[0]
            sums = _call(graph, aten.reshape.default, sums, [*leading, outputs])
            floats = _call(graph, aten._to_copy.default, sums)
            floats.kwargs = {"dtype": torch.float32}
            floats.meta["val"] = floats.meta["val"].to(torch.float32)
            scaled = _call(graph, aten.mul.Tensor, floats, scale)
            result = _call(graph, aten.mul.Tensor, scaled, scale_O)
            if bias is not None:
                result = _call(graph, aten.add.Tensor, result, bias)
        product.replace_all_uses_with(result)
        graph.erase_node(product)
    graph.eliminate_dead_code()


def _constants(product: Any) -> list[Any]:
    return [*product.args[1].args[:3], _bias(product)]


def _bias(product: Node) -> Any:
    return product.args[2] if len(product.args) > 2 else None


def _merge_(graph: Graph, products: Sequence[Any]) -> None:
    first = products[0]
    # Freezing computes the joined weights while it compiles.
    with graph.inserting_before(first):
        joined = [
            None if parts[0] is None else _call(graph, aten.cat.default, list(parts))
            for parts in zip(*map(_constants, products), strict=True)
        ]
        *integers, bias = joined
        weight = _call(graph, DEQUANTIZE_CHANNELS, *integers, *first.args[1].args[3:])
        merged = _call(graph, LINEAR, first.args[0], weight, bias)
        sizes = [len(product.args[1].meta["val"]) for product in products]
        split = _call(graph, aten.split_with_sizes.default, merged, sizes, -1)
        parts = [_call(graph, operator.getitem, split, i) for i in range(len(products))]
    for product, part in zip(products, parts, strict=True):
        part.meta |= {k: v for k, v in product.meta.items() if k == "nn_module_stack"}
        product.replace_all_uses_with(part)
        graph.erase_node(product)


def _call(graph: Graph, target: Any, *arguments: Any) -> Any:
    """Return a call that is added to a graph; of numbers alone, what it returns."""
    if not any(isinstance(x, torch.fx.Node) for x in tree_leaves(arguments)):
        return target(*arguments)
    node = graph.call_function(target, arguments)
    values = torch.fx.node.map_arg(arguments, lambda given: given.meta["val"])
    node.meta["val"] = target(*values)
    return node


QUANTIZED_CONVOLUTION = "onednn.qconv"
PREPACK = torch.ops.onednn.qconv_prepack.default
SHARED = ("stride", "padding", "dilation", "groups")
INTEGER_OPERATOR = re.compile(r"onednn\.q(conv|linear)|aten\._int_mm")


class PackAndCount(CustomGraphPass):
    """Graph pass of Inductor: packs weights for one image of the traced size, and counts products.

    Where the batch is dynamic, Inductor (torch 2.13) packs them for an image of no particular size.
    oneDNN's kernels that want another order then reorder the weights in each call. The order for
    one image suits any batch.
    """

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self.macs: Counter[bool] = Counter()
        """Multiply-accumulates at the traced sizes: of integer operators (True), and of others."""

    def __deepcopy__(self, _: dict[int, Any]) -> PackAndCount:
        return self  # Inductor copies its settings, and the count would be lost

    def __call__(self, graph: Graph) -> None:
        """Repack the weights of a graph, in place, and count its multiply-accumulates."""
        for node in [n for n in graph.nodes if n.op == "call_function"]:
            operator = str(node.target)
            if operator.startswith(QUANTIZED_CONVOLUTION) and node.target is not PREPACK:
                pack_(graph, node)
            self.macs[bool(INTEGER_OPERATOR.match(operator))] += count_macs(node)

    @property
    def integer_share(self) -> float | None:
        """The integer operators' share; None where nothing is multiplied."""
        return self.macs[True] / self.macs.total() if self.macs.total() else None

    def uuid(self) -> str:
        """Return the pass's key in the compiler's cache."""
        return f"{__name__}:1"


def pack_(graph: Graph, convolution: Node) -> None:
    """Repack a convolution's weight for one image, in place, where its size is known."""
    schema = convolution.target._schema  # type: ignore[union-attr]  # an operator has one
    names = [argument.name for argument in schema.arguments]
    given: dict[str, Any] = dict(zip(names, convolution.args, strict=False))
    source, packed = given["qx"], given["qw"]
    sizes = source.meta["val"].shape[1:]
    owner = graph.owning_module
    if packed.op != "get_attr" or not all(isinstance(size, int) for size in sizes):
        return

    def value(name: str) -> Any:
        argument = given[name]
        is_node = isinstance(argument, torch.fx.Node)
        return getattr(owner, str(argument.target)) if is_node else argument

    weight = value("qw")
    repacked = PREPACK(
        weight.to_dense() if weight.is_mkldnn else weight,
        value("w_scale"),
        float(value("x_scale")),
        int(value("x_zero_point")),
        *(given[name] for name in SHARED),
        [1, *sizes],
    )
    name = f"{packed.target}_for_{convolution.name}"
    owner.register_buffer(name, repacked)  # type: ignore[union-attr]
    with graph.inserting_before(convolution):
        constant = graph.get_attr(name)
    constant.meta["val"] = packed.meta["val"]
    convolution.replace_input_with(packed, constant)
