"""Triton's Python backend in place of those which its wheel lacks: ONNX Runtime, PyTorch, OpenVINO.

NVIDIA's backends of these names are C++; each takes and gives the tensors that the configuration
names, as here, so that what the server does with the configuration is as it is with theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

Call = Callable[[dict[str, np.ndarray]], Sequence[np.ndarray]]


def onnxruntime(folder: Path, names: list[str]) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        folder / "model.onnx", providers=["CPUExecutionProvider"]
    )
    return lambda given: session.run(names, given)


def pytorch(folder: Path, names: list[str]) -> Call:
    import torch

    model = torch.jit.load(folder / "model.pt")
    positions = [int(re.fullmatch(r".*__(\d+)", name)[1]) for name in names]

    def call(given: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
        ordered = sorted(given, key=lambda name: int(name.rpartition("__")[2]))
        with torch.inference_mode():
            found = model(*(torch.from_numpy(given[name].copy()) for name in ordered))
        found = found if isinstance(found, (tuple, list)) else (found,)
        return [found[position].numpy() for position in positions]

    return call


def openvino(folder: Path, names: list[str]) -> Call:
    import openvino

    # As this machine's float32, which NVIDIA's backend has no setting for.
    model = openvino.compile_model(folder / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda given: [model(given)[name] for name in names]


class TritonPythonModel:
    """What Triton's Python backend calls: once to load, then for each list of requests."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        self.inputs, self.outputs = config["input"], config["output"]
        self.rows_first = config["max_batch_size"] > 0
        self.names = [tensor["name"] for tensor in self.outputs]
        load = {"onnxruntime": onnxruntime, "pytorch": pytorch, "openvino": openvino}
        self.call = load[config["backend"]](folder, self.names)
        self.calls = Path(args["model_repository"]) / "calls.txt"

    def check(self, answers: Sequence[np.ndarray]) -> None:
        """Refuse shapes and types that are not the configuration's, as NVIDIA's backends do."""
        for tensor, y in zip(self.outputs, answers, strict=True):
            dims = tensor["reshape"]["shape"] if "reshape" in tensor else tensor["dims"]
            wanted = [-1] * self.rows_first + [int(n) for n in dims]
            fits = len(wanted) == y.ndim and all(
                n in (-1, found) for n, found in zip(wanted, y.shape, strict=True)
            )
            if not fits or pb_utils.triton_string_to_numpy(tensor["data_type"]) != y.dtype:
                raise pb_utils.TritonModelException(f"{tensor}: {y.dtype} {y.shape}")

    def execute(self, requests: list[Any]) -> list[Any]:
        # By DLPack, here and below: between arrays of numpy 2 and this Triton, which was built for
        # numpy 1, no bytes pass.
        given = [
            {
                tensor["name"]: np.from_dlpack(
                    pb_utils.get_input_tensor_by_name(request, tensor["name"])
                )
                for tensor in self.inputs
            }
            for request in requests
        ]
        rows = [len(next(iter(one.values()))) for one in given]
        joined = self.rows_first and len(given) > 1
        if joined:
            together = {name: np.concatenate([one[name] for one in given]) for name in given[0]}
            answers = [np.split(y, np.cumsum(rows)[:-1]) for y in self.call(together)]
            each = list(zip(*answers, strict=True))
        else:
            each = [self.call(one) for one in given]
        for ys in each:
            self.check(ys)
        with self.calls.open("a") as file:
            file.writelines(f"{n}\n" for n in ([sum(rows)] if joined else rows))
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor.from_dlpack(name, np.ascontiguousarray(y))
                    for name, y in zip(self.names, ys, strict=True)
                ]
            )
            for ys in each
        ]
