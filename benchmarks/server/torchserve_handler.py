"""A custom handler of TorchServe, as its documentation has it, for an ONNX model."""

import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
from ts.torch_handler.base_handler import BaseHandler


class OnnxHandler(BaseHandler):
    """Joins the rows of a batch for one call; inputs come as lists by name."""

    def initialize(self, context):
        model = Path(context.system_properties["model_dir"]) / "model.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        exact = os.environ.get("SESSION_EXACT", "0")
        options.add_session_config_entry("session.x64quantprecision", exact)
        self.session = onnxruntime.InferenceSession(str(model), options)
        names = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        self.dtypes = {each.name: names[each.type] for each in self.session.get_inputs()}

    def handle(self, data, context):
        rows = [json.loads(row["body"]) for row in data]
        inputs = {
            name: np.concatenate([np.asarray(row[name], dtype) for row in rows])
            for name, dtype in self.dtypes.items()
        }
        return self.session.run(None, inputs)[0].tolist()
