"""Triton's Python backend in place of those which its wheel lacks: ONNX Runtime, PyTorch, OpenVINO.

NVIDIA's backends of these names are C++; each takes and gives the tensors that the configuration
names, as here, so that what the server does with the configuration is as it is with theirs.
"""

from __future__ import annotations

import json
import re
import sys
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
    model = openvino.compile_model(
        folder / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
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

    def execute(self, requests: list[Any]) -> list[Any]:
        given = [
            {
                tensor["name"]: pb_utils.get_input_tensor_by_name(r, tensor["name"]).as_numpy()
                for tensor in self.inputs
            }
            for r in requests
        ]
        rows = [len(next(iter(one.values()))) for one in given]
        joined = self.rows_first and len(given) > 1
        if joined:
            together = {name: np.concatenate([one[name] for one in given]) for name in given[0]}
            answers = [np.split(y, np.cumsum(rows)[:-1]) for y in self.call(together)]
            each = list(zip(*answers, strict=True))
        else:
            each = [self.call(one) for one in given]
        with self.calls.open("a") as file:
            file.writelines(f"{n}\n" for n in ([sum(rows)] if joined else rows))
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(n, np.ascontiguousarray(y)) for n, y in zip(self.names, ys)]
            )
            for ys in each
        ]
