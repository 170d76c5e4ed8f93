"""A service of BentoML with adaptive batching, as its documentation has it.

MODEL=model.onnx WORKERS=2 bentoml serve bentoml_service:OnnxService
"""

import os

import bentoml
import numpy as np
from session import open_session


@bentoml.service(workers=int(os.environ["WORKERS"]))
class OnnxService:
    """An ONNX model; a batched method takes one array, and so several inputs come stacked."""

    def __init__(self) -> None:
        self.session = open_session(os.environ["MODEL"])
        names = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        self.dtypes = {each.name: names[each.type] for each in self.session.get_inputs()}

    @bentoml.api(batchable=True, max_batch_size=32)
    def predict(self, stacked: np.ndarray) -> np.ndarray:
        arrays = (stacked[:, i] for i in range(len(self.dtypes)))
        pairs = zip(self.dtypes.items(), arrays, strict=True)
        inputs = {name: array.astype(dtype) for (name, dtype), array in pairs}
        return self.session.run(None, inputs)[0]
