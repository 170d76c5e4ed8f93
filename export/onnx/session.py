"""onnxruntime: sessions as predictors, its optimizer, and which kernels it chooses."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from compress.common.errors import ArtifactInvalid, Unavailable, raised_as
from compress.common.foreign.native_runtimes import onnx_runtime
from compress.common.tensor_difference import relative_error
from compress.export.common.int8_sums import has_16_bit_sums

if TYPE_CHECKING:
    import onnx_ir as ir

    from compress.common.forward import Predictor

onnxruntime = onnx_runtime()
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
EXACT_SUMS = ("session.x64quantprecision", "1")
"""Setting by which onnxruntime's int8 products are exact on x86 processors without VNNI.

There it adds products of unsigned and signed 8-bit numbers in pairs in 16 bits, and sums beyond
them are cut off: a small int8 network was wrong by a tenth to a third of its outputs' norm on an
EPYC with AVX2. With the setting, weights are made unsigned where the processor is such a one.
"""


def session_predictor(file: Path, threads: int, device: str = "cpu") -> Predictor:
    """Return a predictor that runs an ONNX file; ArtifactInvalid where onnxruntime cannot load it.

    Raise Unavailable where the device is a CUDA one, and onnxruntime does not find CUDA's
    libraries.
    """
    if device == "cpu":
        return _predictor(exact_session(file, threads))
    number = int(device.partition(":")[2] or 0)
    session = _session(file, session_options(threads), [(CUDA, {"device_id": number}), CPU])
    # Where the libraries are missing, onnxruntime (1.31) takes the CPU, and only logs it.
    if CUDA not in session.get_providers():
        raise Unavailable(
            f"{file}: onnxruntime does not find CUDA's libraries; "
            "pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )
    return _predictor(session)


def opened_session(file: Path, threads: int) -> AbstractContextManager[Predictor]:
    """Open an ONNX file on the CPU for a ``with`` block."""
    return nullcontext(session_predictor(file, threads))


def unoptimized_predictor(file: Path, threads: int) -> Predictor:
    """Return a predictor that runs a file's operators as they are."""
    return _predictor(_session(file, unoptimized_options(threads)))


def counted_predictor(
    file: Path, threads: int, inputs: tuple[torch.Tensor, ...]
) -> tuple[Predictor, dict[str, Any]]:
    """Return a predictor, and facts of the kernels that run the heavy operators.

    They are the number of integer and of float kernels, and `integer_share`, the integer kernels'
    share of the multiply-accumulates of a call with the inputs, where it can be counted.
    """
    # They import onnx, which opening a file does not need.
    from compress.export.onnx.graph import count_kernels, integer_macs_share
    from compress.export.onnx.proto_io import read

    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        session = exact_session(file, threads, optimized, profiled=True)
        predict, model, share = _predictor(session), read(optimized), None
        try:
            predict(*inputs)
        except Exception:  # noqa: BLE001 - the comparison with the source meets it too, and reports
            session.end_profiling()
        else:
            share = integer_macs_share(model, Path(session.end_profiling()))
    return predict, {**count_kernels(model), "integer_share": share}


def plain_session_error(
    exact: Predictor, file: Path, threads: int, inputs: tuple[torch.Tensor, ...]
) -> float:
    """Return how far a session without :data:`EXACT_SUMS` is off, as a share of the norm."""
    if not has_16_bit_sums():
        return 0.0
    plain = _predictor(_session(file, session_options(threads)))
    return max(map(relative_error, exact(*inputs), plain(*inputs)), default=0.0)


def optimize(model: ir.Model, level: Literal["basic", "extended"]) -> ir.Model:
    """Return a model as onnxruntime rewrites it.

    Level `basic` folds constants and BatchNorm, and gives standard operators; `extended` also fuses
    them into onnxruntime's own, which no other runtime knows.
    """
    from onnx_ir.passes.common import RemoveUnusedOpsetsPass

    from compress.export.onnx.proto_io import read, write

    levels = onnxruntime.GraphOptimizationLevel
    # The level above these changes layouts for the processor that it runs on.
    chosen = {"basic": levels.ORT_ENABLE_BASIC, "extended": levels.ORT_ENABLE_EXTENDED}[level]
    with tempfile.TemporaryDirectory(prefix="compress-onnx-") as folder:
        file, optimized = Path(folder) / "model.onnx", Path(folder) / "rewritten.onnx"
        write(model, file)
        options = session_options(1, optimized)
        options.graph_optimization_level = chosen
        _session(file, options)
        rewritten = read(optimized, weights=True)
    RemoveUnusedOpsetsPass()(rewritten)  # onnxruntime lists all operator sets that it knows
    used = sorted(rewritten.opset_imports.items())
    rewritten.opset_imports.clear()
    rewritten.opset_imports.update(used)
    return rewritten


def _predictor(session: Any) -> Predictor:
    names = [i.name for i in session.get_inputs()]

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        feed = {n: x.detach().cpu().numpy() for n, x in zip(names, inputs, strict=True)}
        return tuple(torch.from_numpy(y) for y in session.run(None, feed))

    return predict


def session_options(threads: int, optimized: Path | None = None, *, profiled: bool = False) -> Any:
    """Return a session's options; the rewritten model and a profile go to and beside a file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A waiting thread that spins takes the core from whatever is measured at the same time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if optimized:
        options.optimized_model_filepath = str(optimized)
        options.enable_profiling = profiled
        options.profile_file_prefix = str(optimized.with_suffix(""))
        # In one file, a model of 2 GiB could not be written.
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{optimized.name}.data"
        )
    return options


def unoptimized_options(threads: int) -> Any:
    """Return options with which a graph runs as it is."""
    options = session_options(threads)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def exact_session(
    file: Path, threads: int, optimized: Path | None = None, *, profiled: bool = False
) -> Any:
    """Return a session with exact int8 products, where onnxruntime can make the file's so."""
    options = session_options(threads, optimized, profiled=profiled)
    if not has_16_bit_sums():  # with EXACT_SUMS int8 takes up to twice as long, also with VNNI
        return _session(file, options)
    options.add_session_config_entry(*EXACT_SUMS)
    try:
        return _session(file, options)
    except ArtifactInvalid:
        # onnxruntime 1.32 makes a weight that two operators share unsigned twice, and fails.
        return _session(file, session_options(threads, optimized, profiled=profiled))


def _session(file: Path, options: Any, providers: Sequence[Any] = (CPU,)) -> Any:
    with raised_as(ArtifactInvalid, f"{file}: onnxruntime cannot load it"):
        return onnxruntime.InferenceSession(str(file), options, list(providers))
