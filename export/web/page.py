"""Writes one HTML file that runs an ONNX file in a browser, and measures it there."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import Requirement
from compress.common.tensor_difference import largest_finite

if TYPE_CHECKING:
    import torch

    from compress.artifacts.artifact import Artifact

    Batch = tuple[torch.Tensor, ...]


class NodePackage(Requirement):
    """A package of the npm registry, in the folder that an environment variable names."""

    variable: str

    def missing(self) -> bool:
        """Whether the variable names no folder of that package."""
        return self._package_file() is None

    def need_folder(self) -> Path:
        """Return the folder, or raise Unavailable."""
        if (file := self._package_file()) is None:
            raise Unavailable(f"needs {self.what}, which was not found; {self.install}")
        return file.parent

    def version(self) -> str:
        """Return the package's version; empty where it is missing."""
        file = self._package_file()
        return json.loads(file.read_text())["version"] if file else ""

    def _package_file(self) -> Path | None:
        file = Path(os.environ.get(self.variable, ""), "package.json")
        try:
            return file if json.loads(file.read_text())["name"] == self.what else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


ONNXRUNTIME_WEB = NodePackage(
    what="onnxruntime-web",
    variable="ONNXRUNTIME_WEB",
    install="npm install onnxruntime-web@1.30.0, and set ONNXRUNTIME_WEB to its folder, "
    "such as $PWD/node_modules/onnxruntime-web",
)
TEMPLATE = Path(__file__).with_name("page.html")
SCRIPT, WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
"""What onnxruntime-web needs to run on the CPU: its code in JavaScript and in WebAssembly."""
LARGEST_MODEL = 2**28
"""Bytes of a model in a page. Browsers hold the page as one text, of at most 2**29 characters."""
EQUAL_SHARE = 0.01


def web_page(
    name: str,
    model: Artifact,
    batches: Mapping[int, Sequence[Batch]],
    *,
    seconds: float,
    baseline: Mapping[int, float],
    facts: Mapping[str, str],
) -> str:
    """Return a page that holds an ONNX file, onnxruntime-web, inputs by rows and answers.

    It needs no other file and asks nothing of the network. Answers are equal up to 1 % of the
    largest one, as runtimes round integers differently. The page measures calls of each number of
    rows for some seconds, and shows them beside `baseline`, milliseconds of a call here by rows,
    and `facts` of the model. Raise StageFailed where the model is too large, or onnxruntime-web
    lacks a file.
    """
    folder = ONNXRUNTIME_WEB.need_folder() / "dist"
    model.verify_cached()
    if model.payload_bytes > LARGEST_MODEL:
        raise StageFailed(
            f"{model.path}: has {model.payload_bytes / 2**20:,.0f} MiB, expected at most "
            f"{LARGEST_MODEL / 2**20:,.0f} MiB for a page in a browser"
        )
    packed = {}
    for id_, part in (("script", SCRIPT), ("wasm", WASM)):
        try:
            packed[id_] = _packed((folder / part).read_bytes(), level=9)
        except OSError as error:
            raise StageFailed(
                f"{folder / part}: {error.strerror}; {ONNXRUNTIME_WEB.install}"
            ) from None
    # The graph comes first, before the weights that a large one has beside it.
    files = sorted(model.model_files, key=lambda file: file != model.payload)
    for i, file in enumerate(files):
        packed[f"file-{i}"] = _packed((model.path / file).read_bytes())
    sizes, largest = [], 0.0
    with model.open() as predict:
        for rows, of_this_size in batches.items():
            stored = []
            for inputs in of_this_size:
                outputs = predict(*inputs)
                largest = max(largest, *map(largest_finite, outputs))
                tensors = {"inputs": inputs, "outputs": outputs}
                stored.append({key: [*map(_tensor, found)] for key, found in tensors.items()})
            sizes.append({"rows": rows, "batches": stored, "baseline_ms": baseline.get(rows)})
    setup = {
        "files": files,
        "sizes": sizes,
        "atol": EQUAL_SHARE * largest,
        "seconds": seconds,
        "facts": {
            "Model": f"{name}, {model.payload_bytes / 2**20:.2f} MiB",
            "Digest": model.digest,
            "Runtime": f"onnxruntime-web {ONNXRUNTIME_WEB.version()}",
            **facts,
        },
    }
    blocks = (
        f'<script type="text/plain" id="{id_}">{text}</script>' for id_, text in packed.items()
    )
    return Template(TEMPLATE.read_text()).substitute(
        title=html.escape(name),
        setup=json.dumps(setup).replace("<", r"\u003c"),
        packed="\n".join(blocks),
    )


def _packed(content: bytes, level: int = 6) -> str:
    return base64.b64encode(gzip.compress(content, level, mtime=0)).decode()


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    array = tensor.detach().cpu().contiguous().numpy()
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "packed": _packed(array.tobytes(), level=1),
    }
