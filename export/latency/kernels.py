"""The kernels that onnxruntime runs a model with, each measured alone."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx.helper import make_graph, make_model, make_tensor_value_info, np_dtype_to_tensor_dtype

from compress.common.config import Settings
from compress.common.errors import StageFailed, raised_as
from compress.common.sealed_json import canonical_json, read_state, write_state
from compress.export.onnx.session import exact_session, onnxruntime, unoptimized_options
from compress.profiling.benchmark import CallTimer, MeasuredShare, NotMeasurable, unmeasurable

if TYPE_CHECKING:
    Arrays = Mapping[str, np.ndarray[Any, Any]]

TABLES = Path(".store", "latency")  # folder of measured kernels, in the results' directory
KERNEL_SECONDS = 0.02  # for which each kernel is called
FEWEST_CALLS = 5
MEASURED_TOGETHER = 8
"""Kernels that are called in turn, so that a busy moment of the machine meets all of them."""
PAUSES = (0.1, 0.2, 0.4, 0.8)
"""Seconds until kernels that other processes disturbed are measured again."""
LOW_QUANTILE = 0.1  # Of a kernel's calls. A low one, as other load only ever makes a call longer.


@dataclass(frozen=True, eq=False)
class Kernel:
    """One operator of an optimized graph, with the sizes of one call."""

    key: str
    """Hash of the operator, its attributes, and the types and sizes of what it reads and writes."""
    operator: str
    sizes: str
    """Of its inputs and outputs, in words."""
    weight_bytes: int
    """Bytes of the constants that it reads."""
    node: onnx.NodeProto
    weights: tuple[onnx.TensorProto, ...]
    inputs: Arrays
    outputs: tuple[onnx.ValueInfoProto, ...]
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    ir_version: int
    """Of the model. Not onnx's newest, which onnxruntime's release may not read yet."""

    def to_model(self) -> onnx.ModelProto:
        """Return a model of this operator alone."""
        inputs = [_value_info(name, array) for name, array in self.inputs.items()]
        graph = make_graph([self.node], "kernel", inputs, self.outputs, self.weights)
        return make_model(graph, opset_imports=self.opsets, ir_version=self.ir_version)


def kernels_of(file: Path, inputs: Arrays, threads: int) -> list[Kernel]:
    """Return the kernels of a model for inputs, in the order in which they run.

    Those of the body of an If, a Loop or a Scan are one kernel together. StageFailed where
    onnxruntime cannot run the model one operator at a time.
    """
    with TemporaryDirectory(prefix="compress-kernels-") as folder:
        optimized = Path(folder) / "optimized.onnx"
        exact_session(file, threads, optimized)
        model = onnx.load(optimized)
    # With all that its operators write as outputs.
    complete = onnx.ModelProto()
    complete.CopyFrom(model)
    del complete.graph.output[:]
    names = [name for node in model.graph.node for name in node.output if name]
    complete.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    with raised_as(StageFailed, f"{file}: its kernels cannot be measured one by one"):
        session = onnxruntime.InferenceSession(
            complete.SerializeToString(), unoptimized_options(1), ["CPUExecutionProvider"]
        )
        outputs = session.run(names, dict(inputs))
    values = {**inputs, **dict(zip(names, outputs, strict=True))}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    return [_kernel(node, weights, values, model) for node in model.graph.node]


def _kernel(
    node: onnx.NodeProto,
    weights: Mapping[str, onnx.TensorProto],
    values: Arrays,
    model: onnx.ModelProto,
) -> Kernel:
    names = dict.fromkeys(name for name in _inputs_of(node) if name)
    constants = tuple(weights[name] for name in names if name in weights)
    # Names inside a body that are neither weights nor values are values of the body itself.
    read_values = {name: values[name] for name in names if name in values and name not in weights}
    outputs = tuple(_value_info(name, values[name]) for name in node.output if name)
    read_sizes = [
        ("weight", weights[name].data_type, [*weights[name].dims])
        if name in weights
        else ("value", str(values[name].dtype), [*values[name].shape])
        for name in names
        if name in weights or name in values
    ]
    attributes = sorted(
        (a.name, hashlib.sha256(a.SerializeToString(deterministic=True)).hexdigest())
        for a in node.attribute
    )
    written_sizes = [[*values[name].shape] for name in node.output if name]
    described = [node.domain, node.op_type, attributes, read_sizes, written_sizes]
    return Kernel(
        key=hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32],
        operator=node.op_type,
        sizes=" ".join("×".join(map(str, sizes)) or "scalar" for _, _, sizes in read_sizes)
        + " → "
        + " ".join("×".join(map(str, sizes)) or "scalar" for sizes in written_sizes),
        weight_bytes=sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in constants),
        node=node,
        weights=constants,
        inputs=read_values,
        outputs=outputs,
        opsets=tuple(model.opset_import),
        ir_version=model.ir_version,
    )


def _inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that an operator reads, those that its branches take from outside too."""
    yield from node.input
    for attribute in node.attribute:
        yield from (output.name for output in attribute.g.output)
        for inner in attribute.g.node:
            yield from _inputs_of(inner)


def measure_kernels(kernels: Sequence[Kernel], threads: int) -> list[float]:
    """Return the seconds of one call of each kernel, without what any call of a session takes."""
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    array, opsets = np.zeros(1, np.float32), (onnx.helper.make_opsetid("", 18),)
    inputs, outputs = {"x": array}, (_value_info("y", array),)
    copy = Kernel("", "Identity", "", 0, node, (), inputs, outputs, opsets, ir_version=8)
    empty = _seconds_of([copy], threads)[0]
    return [
        max(0.0, seconds - empty)
        for start in range(0, len(kernels), MEASURED_TOGETHER)
        for seconds in _seconds_of(kernels[start : start + MEASURED_TOGETHER], threads)
    ]


def _seconds_of(kernels: Sequence[Kernel], threads: int) -> list[float]:
    """Measure some kernels, again after pauses that get longer where other processes disturb.

    A few take a fifth of a second, in which a short disturbance would else cost all of a model's.
    """
    for pause in PAUSES:
        with suppress(NotMeasurable):
            return _seconds_of_now(kernels, threads)
        time.sleep(pause)
    return _seconds_of_now(kernels, threads)


def _seconds_of_now(kernels: Sequence[Kernel], threads: int) -> list[float]:
    """Call kernels in turn and return the low quantile of each one's seconds."""
    timer, calls = CallTimer(threads), [_bound_call(kernel, threads) for kernel in kernels]
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    deadline = time.perf_counter() + KERNEL_SECONDS * len(calls)
    while len(times[0]) < FEWEST_CALLS or time.perf_counter() < deadline:
        for call, own in zip(calls, times, strict=True):
            own.append(timer.call(call)[1])
    if timer.doubt:
        raise NotMeasurable(unmeasurable("the latency of a kernel", timer.doubt))
    return [float(np.quantile(own, LOW_QUANTILE)) for own in times]


def _bound_call(kernel: Kernel, threads: int) -> Callable[[], None]:
    """Return what runs one kernel on inputs and outputs in onnxruntime's own memory."""
    options = unoptimized_options(threads)
    content = kernel.to_model().SerializeToString()
    session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in kernel.inputs.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    for output in kernel.outputs:
        binding.bind_output(output.name)
    return partial(session.run_with_iobinding, binding)


def _value_info(name: str, array: np.ndarray[Any, Any]) -> onnx.ValueInfoProto:
    return make_tensor_value_info(name, np_dtype_to_tensor_dtype(array.dtype), array.shape)


class MeasuredKernel(Settings):
    """The latency of one kernel."""

    operator: str
    sizes: str
    """Sizes of its inputs and outputs."""
    seconds: float
    """Of one call, the tenth percentile."""


class MeasuredTable(Settings):
    """What was measured on one machine: the content of a table's file."""

    kernels: dict[str, MeasuredKernel] = {}
    models: dict[str, MeasuredShare] = {}
    """By a hash of their kernels, and of those of the model that they were measured beside."""


class KernelTable:
    """Latencies of kernels on one machine, with one release of onnxruntime and some threads."""

    def __init__(self, folder: Path, machine: Mapping[str, Any], threads: int) -> None:
        """Read the table of a machine, or begin one where there is none that can be read."""
        version = onnxruntime.__version__
        self.setup: dict[str, Any] = {**machine, "onnxruntime": version, "threads": threads}
        self.key = canonical_json(self.setup)
        name = hashlib.sha256(self.key.encode()).hexdigest()[:16]
        self.file = folder / f"kernels-{name}.json"
        self.threads = threads
        known = read_state(self.file, self.key, MeasuredTable) or MeasuredTable()
        self.kernels, self.models = known.kernels, known.models

    def measure(self, kernels: Sequence[Kernel]) -> None:
        """Measure the kernels that the table lacks; it is written after every few of them."""
        missing = list({k.key: k for k in kernels if k.key not in self.kernels}.values())
        for start in range(0, len(missing), MEASURED_TOGETHER):
            some = missing[start : start + MEASURED_TOGETHER]
            for kernel, seconds in zip(some, measure_kernels(some, self.threads), strict=True):
                self.kernels[kernel.key] = MeasuredKernel(
                    operator=kernel.operator, sizes=kernel.sizes, seconds=seconds
                )
            self.write()

    def seconds(self, kernel: Kernel) -> float:
        """Return the latency of a measured kernel."""
        return self.kernels[kernel.key].seconds

    def write(self) -> None:
        """Write what is known into the table's file."""
        kernels, models = (dict(sorted(known.items())) for known in (self.kernels, self.models))
        write_state(self.file, self.key, MeasuredTable(kernels=kernels, models=models))
