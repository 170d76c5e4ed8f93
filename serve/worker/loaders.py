"""Load each kind of packaged model as a function of numpy arrays."""

from __future__ import annotations

import io
import os
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.checkpoint.pt2_safety import find_code
from compress.common.foreign.native_runtimes import onnx_runtime, open_vino, openvino_core
from compress.export.common.int8_sums import has_16_bit_sums

if TYPE_CHECKING:
    from compress.serve.worker.tensors import Array, Named

    Run = Callable[[Sequence[Array]], list[Array]]

THREADS_VARIABLE = "HANDLER_THREADS"  # overrides the archive's number of threads


def load_onnx(payload: Path, settings: Named, threads: int) -> Run:
    """Load an ONNX file in ONNX Runtime."""
    onnxruntime = onnx_runtime()

    def session_of(exact: str) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads that spin while idle take the cores from the other workers.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.x64quantprecision", exact)
        return onnxruntime.InferenceSession(str(payload), options, ["CPUExecutionProvider"])

    try:
        # Exact sums take up to twice as long where the processor does not need them.
        session = session_of("1" if has_16_bit_sums() else "0")
    except Exception:  # noqa: BLE001 - of onnxruntime 1.32, for weights that two operators share
        session = session_of("0")
    inputs = [spec["name"] for spec in settings["inputs"]]
    outputs = settings["outputs"]
    return lambda arrays: list(session.run(outputs, dict(zip(inputs, arrays, strict=True))))


def load_torchscript(payload: Path, settings: Named, threads: int) -> Run:
    """Load a TorchScript file."""
    import torch

    load: Any = torch.jit.load  # it has no annotations
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit.* is deprecated")
        module = load(str(payload), map_location="cpu").eval()
        if settings.get("optimize_for_inference"):  # its result cannot be saved
            module = torch.jit.optimize_for_inference(module)
    run = as_array_function(module, threads)
    lock: Any = threading.Lock() if settings.get("one_call_at_a_time") else nullcontext()

    def run_in_turn(arrays: Sequence[Array]) -> list[Array]:
        with lock:
            return run(arrays)

    return run_in_turn


def load_graph(payload: Path, settings: Named, threads: int) -> Run:
    """Load a ``torch.export`` program; refuse files that could run code while they are read."""
    import torch

    # It registers quantize_per_tensor and others.
    import_module("torch.ao.quantization.fx._decomposed")
    from torch.export.pt2_archive import PT2ArchiveReader
    from torch.export.pt2_archive._package import load_pt2

    content = payload.read_bytes()
    for danger in find_code(PT2ArchiveReader(io.BytesIO(content))):
        raise RuntimeError(f"{payload.name} {danger}; it was not read")
    module: Any = load_pt2(io.BytesIO(content)).exported_programs["model"].module()
    choose = torch.ops.quantized_decomposed.choose_qparams.tensor

    # choose_qparams of torch 2.13 raises for tensors without elements, as of requests without rows:
    # it gets a zero. The same as in compress.artifacts.graph_model, which is not in an archive.
    def choose_range(x: torch.Tensor, *limits: Any) -> Any:
        return choose(x if x.numel() else x.new_zeros(1), *limits)

    for node in module.graph.find_nodes(op="call_function", target=choose):
        node.target = choose_range
    module.recompile()
    return as_array_function(module, threads)


def load_aot(payload: Path, settings: Named, threads: int) -> Run:
    """Load an AOTInductor package; refuse one that was compiled for another kind of machine."""
    import torch

    missing = missing_here(settings["built_for"])
    if missing:
        raise RuntimeError(f"{payload.name} was compiled for {missing}; compile it on this machine")
    # Not torch._inductor.aoti_load_package, which compiles test programs if its cache is empty.
    package = torch._C._aoti.AOTIModelPackageLoader(str(payload), "model", True, 1, -1)
    return as_array_function(
        lambda *inputs: package.boxed_run([x.contiguous() for x in inputs]), threads
    )


def missing_here(built_for: Named) -> str:
    """Describe what compiled code needs and this machine lacks; empty if nothing."""
    import torch

    found = torch.cpu.get_capabilities()
    here = {"device": "cpu", "system": platform.system(), "machine": platform.machine()}
    here["torch"] = torch.__version__.partition("+")[0]
    for name, value in here.items():
        if built_for[name] != value:
            return f"{name} {built_for[name]}, and here it is {value}"
    absent = [name for name in built_for["instructions"] if not found.get(name)]
    return f"a processor with {', '.join(absent)}, which this one has not" if absent else ""


def load_openvino(payload: Path, settings: Named, threads: int) -> Run:
    """Load an OpenVINO model, for calls from several threads at a time."""
    # A call takes a stream: with one alone, concurrent calls would wait for each other.
    streams = max(1, len(os.sched_getaffinity(0)) // threads)
    options = {
        "INFERENCE_PRECISION_HINT": "f32",  # by default bfloat16, where the processor has it
        "INFERENCE_NUM_THREADS": threads * streams,
        "NUM_STREAMS": streams,
    }
    model = openvino_core().compile_model(payload, "CPU", options)
    shapes = [port.partial_shape for port in model.inputs]
    names = [spec["name"] for spec in settings["inputs"]]
    requests = threading.local()  # a request of OpenVINO's takes one call at a time

    def run(arrays: Sequence[Array]) -> list[Array]:
        for name, shape, array in zip(names, shapes, arrays, strict=True):
            # OpenVINO 2026.4 gives outputs without rows for other sizes, instead of an error.
            if not shape.compatible(open_vino().PartialShape(list(array.shape))):
                found, expected = list(array.shape), shape.to_string()
                raise ValueError(f"input {name} has shape {found}, expected {expected}")
        if not hasattr(requests, "own"):
            requests.own = model.create_infer_request()
        answers = requests.own.infer(dict(enumerate(arrays)), share_outputs=False)
        return list(answers.values())

    return run


def as_array_function(module: Callable[..., Any], threads: int) -> Run:
    """Wrap a function of tensors as a function of arrays."""
    import torch

    torch.set_num_threads(threads)

    def run(arrays: Sequence[Array]) -> list[Array]:
        with torch.inference_mode():
            return [out.numpy() for out in flatten_outputs(module(*map(torch.from_numpy, arrays)))]

    return run


LOADERS = {
    "onnx": load_onnx,
    "aot": load_aot,
    "graph": load_graph,
    "torchscript": load_torchscript,
    "openvino": load_openvino,
}


def replay(run: Run, inputs: list[Array], expected: list[Array], atol: float) -> None:
    """Raise RuntimeError unless the recorded inputs give the recorded outputs within `atol`."""
    outputs = run(inputs)
    types, expected_types = ([(a.shape, a.dtype) for a in arrays] for arrays in (outputs, expected))
    pairs = zip(outputs, expected, strict=False)
    if types != expected_types or not all(np.allclose(a, b, 0, atol) for a, b in pairs):
        raise RuntimeError(f"the model does not answer the probe as packaged (within {atol:g})")


def flatten_outputs(answer: Any) -> list[Any]:
    """Return the tensors of a nested model output, in order."""
    answer = list(answer.values()) if isinstance(answer, dict) else answer
    if isinstance(answer, list | tuple):
        return [tensor for part in answer if part is not None for tensor in flatten_outputs(part)]
    return [answer]
