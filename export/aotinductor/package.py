"""AOTInductor packages: compile a program, load a package, count its kernels."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch.export.pt2_archive import PT2ArchiveReader

from compress.checkpoint.safe_zip import refuse_bomb
from compress.common.errors import ArtifactInvalid, StageFailed, first_line
from compress.export.aotinductor.lowering import merge_products_, multiply_rows_, widen_ranges_
from compress.export.common.compiled_code import refuse_misfit
from compress.export.common.runtime import NO_UINT16_KERNELS, refuse_unrolled_rnn
from compress.graph.library_cache import patched_attribute
from compress.graph.torch_export import move_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.export import ExportedProgram

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
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor"
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
    from torch._inductor.utils import fresh_cache

    from compress.export.aotinductor.lowering import IntegerShare, PackForImages, PassSequence

    # Inductor (torch 2.13) hands 16-bit activations to 8-bit kernels.
    if any(torch.uint16 in node.args for node in program.graph.nodes):
        raise StageFailed(NO_UINT16_KERNELS)
    refuse_one_channel_integers(program)
    refuse_unrolled_rnn(program, "AOTInductor", kernels=("LSTM",))
    share = IntegerShare()
    settings: dict[str, Any] = {**SETTINGS, "post_grad_custom_pre_pass": share}
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
                merge_products_(program)
                multiply_rows_(program)
                settings["post_grad_custom_pre_pass"] = PassSequence(PackForImages(), share)
            else:
                program = move_program(program, device)
                settings["freezing"] = False  # it is for oneDNN's kernels
            # A stored program has none.
            program._example_inputs = (tuple(signature.example(device=device)), {})
            with torch.no_grad(), config.patch(settings), _exact_near_zero():
                aoti_compile_and_package(
                    program, package_path=str(package), inductor_configs=settings
                )
            return {**_without_sources(package, file), "integer_share": share.value}
        except Exception as error:  # noqa: BLE001 - raised below, once the cache is removed
            failure = error
    raise StageFailed(
        f"AOTInductor cannot compile the model: {type(failure).__name__}: {first_line(failure)}"
    ) from failure


def load(file: Path, signature: Signature, device: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that runs a package, and refuses other inputs than the signature's."""
    # The archive's sizes are checked first: the loader unpacks it to disk, whatever it holds.
    refuse_bomb(file)
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else -1
    try:
        # Not torch._inductor.aoti_load_package, which compiles test programs where no cache is.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", True, 1, index)
    except RuntimeError as error:
        raise ArtifactInvalid(
            f"{file}: not an AOTInductor package, or truncated ({first_line(error)})"
        ) from error

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        refuse_misfit(signature, inputs)
        return tuple(loader.boxed_run([x.contiguous() for x in inputs]))

    return run


def refuse_one_channel_integers(program: ExportedProgram) -> None:
    """Raise StageFailed for an integer convolution of one channel that has a dynamic axis."""
    # Inductor (torch 2.13) takes their results for contiguous, and oneDNN's kernel writes the
    # channels last: the code compiles, and its outputs are at chance.
    for node in program.graph.nodes:
        source = node.args[0] if CONVOLUTION.match(str(node.target)) else None
        if source is None or not str(source.target).startswith(DEQUANTIZE):
            continue
        shape = source.meta["val"].shape
        if shape[1] == 1 and not all(isinstance(size, int) for size in shape):
            raise StageFailed(
                "a convolution reads integers of one channel, and its input has a dynamic axis: "
                "AOTInductor compiles that into wrong answers; quantize with `target: "
                "inductor-cpu`, which leaves it in float, or `exclude` it"
            )


@contextmanager
def _exact_near_zero() -> Iterator[None]:
    """Have Inductor use vector kernels of expm1 and atanh that are exact near zero, in a block."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    # Inductor (torch 2.13) writes expm1, and so ELU, as exp(x) - 1, and atanh by log(1 + x).
    with (
        patched_attribute(CppVecOverrides, "expm1", staticmethod(lambda x: f"{x}.expm1()")),
        patched_attribute(CppVecOverrides, "atanh", staticmethod(lambda x: f"{x}.atanh()")),
    ):
        yield


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
    calls = Counter(CALL.findall(source))

    def matching(pattern: re.Pattern[str]) -> dict[str, int]:
        return {name: calls[name] for name in sorted(calls) if pattern.match(name)}

    return {"integer_kernels": matching(INTEGER_KERNEL), "float_kernels": matching(FLOAT_KERNEL)}
