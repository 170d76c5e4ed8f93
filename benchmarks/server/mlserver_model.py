"""A custom runtime of MLServer, as its documentation has it; `mlserver start` loads it."""

import os

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from session import open_session


class OnnxModel(MLModel):
    """An ONNX model behind the Open Inference Protocol."""

    async def load(self) -> bool:
        self.session = open_session(os.environ["MODEL"])
        self.names = [output.name for output in self.session.get_outputs()]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {each.name: NumpyCodec.decode_input(each) for each in payload.inputs}
        arrays = self.session.run(self.names, inputs)
        pairs = zip(self.names, arrays, strict=True)
        outputs = [NumpyCodec.encode_output(name, array) for name, array in pairs]
        return InferenceResponse(model_name=self.name, outputs=outputs)
