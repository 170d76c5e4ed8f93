"""Script that runs an unpacked archive's handler without TorchServe; it imports nothing of ours.

Requests and responses start with their length, 8 bytes big-endian; in responses, 8 of HTTP status
follow.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO


class _Context:
    """The part of TorchServe's context that the handler uses."""

    def __init__(self, folder: Path) -> None:
        import yaml

        self.manifest = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_text())
        self.system_properties = {"model_dir": str(folder)}
        self.model_yaml_config = yaml.safe_load((folder / "model-config.yaml").read_text())
        self.status = 200

    def get_all_request_header(self, i: int) -> dict[str, str]:
        return {"Content-Type": "application/x-npz", "Accept": "application/x-npz"}

    def set_response_status(self, status: int, phrase: str, i: int) -> None:
        self.status = status

    def set_response_header(self, i: int, key: str, value: str) -> None:
        """Ignore a response's headers."""

    def set_response_content_type(self, i: int, value: str) -> None:
        """Ignore a response's type."""


def run(folder: Path, requests: BinaryIO, answers: BinaryIO) -> None:
    """Load the handler, signal that with an empty response, and answer until the input ends."""
    sys.path.insert(0, str(folder))
    context = _Context(folder)
    model: Any = importlib.import_module("handler").PackagedModel()
    model.initialize(context)
    body: str | bytes = b""
    while True:
        content = body.encode() if isinstance(body, str) else body
        sizes = len(content).to_bytes(8, "big") + context.status.to_bytes(8, "big")
        answers.write(sizes + content)
        answers.flush()
        length = requests.read(8)
        if len(length) < 8:
            return
        context.status = 200
        (body,) = model.handle([{"body": requests.read(int.from_bytes(length, "big"))}], context)


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the responses
    run(Path(sys.argv[1]), sys.stdin.buffer, out)
