"""LitServe with batching, as its documentation has it.

MODEL=model.onnx PORT=8080 python litserve_server.py
"""

import os

import litserve
import numpy as np
from session import open_session


class OnnxApi(litserve.LitAPI):
    """An ONNX model whose inputs come as lists by name."""

    def setup(self, device):
        self.session = open_session(os.environ["MODEL"])
        names = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        self.dtypes = {each.name: names[each.type] for each in self.session.get_inputs()}

    def decode_request(self, request):
        return {name: np.asarray(request[name], dtype) for name, dtype in self.dtypes.items()}

    def batch(self, inputs):
        return {name: np.concatenate([each[name] for each in inputs]) for name in self.dtypes}

    def predict(self, x):
        return self.session.run(None, x)[0]

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"output": output.tolist()}


if __name__ == "__main__":
    api = OnnxApi(max_batch_size=int(os.environ["BATCH"]), batch_timeout=0.001)
    workers = int(os.environ["WORKERS"])
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers)
    server.run(host="127.0.0.1", port=int(os.environ["PORT"]), generate_client_file=False)
