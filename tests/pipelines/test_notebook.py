"""A notebook, executed by a kernel: what cells show of results, progress and errors."""

import re

import pytest

from tests.pipelines.conftest import BRIEFLY

nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELLS = {
    "briefly": BRIEFLY,
    "model": """
import torch
from torch import nn
import compress

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x):
        return self.layers(x)

x = torch.randn(96, 8)
y = Net()(x).argmax(1)
""",
    "trained": "model = compress.train(Net(), epochs=40, train=(x, y), val=(x, y))",
    "artifact": "compress.quantize_static(model, data=x)",
    "optimized": """
compress.optimize(model, train=(x, y), val=(x, y), max_drop=50, goal="smaller")""",
    "refused": """
compress.quantize_static(
    model, data=x, val=(x, y), gates=[{"gate": "min_metric", "at": 1.1}]
)""",
    "wrong": "compress.quantize_static(model, data=x, calibration_samples=5)",
    "debug": """
import logging
logging.getLogger("compress").setLevel("DEBUG")
compress.quantize_static(model, data=x, calibration_samples=5)""",
}


class Client(nbclient.NotebookClient):
    """Executes a notebook, and keeps the texts that replaced what a cell displays."""

    def __init__(self, notebook) -> None:
        options = {"allow_errors": True, "timeout": 240, "kernel_name": "python3"}
        super().__init__(notebook, **options)
        self.updates: list[str] = []

    def process_message(self, message, cell, cell_index):
        if message["msg_type"] == "update_display_data":
            self.updates.append(message["content"]["data"]["text/plain"])
        return super().process_message(message, cell, cell_index)


@pytest.mark.slow
def test_a_notebook_shows_tables_progress_and_errors_of_one_line() -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code.strip()) for code in CELLS.values()]
    )
    client = Client(notebook)
    client.execute()
    outputs = dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))
    # Progress is one text, which is replaced and empty at the end; nothing asks for ipywidgets.
    assert not [o for found in outputs.values() for o in found if "ipywidgets" in str(o)]
    assert any(re.search(r"train .*epoch \d+/40", text) for text in client.updates)
    assert {o["data"]["text/plain"] for o in outputs["trained"]} == {""}
    for name, table in {"artifact": "quantize_static (graph)", "optimized": "export_onnx"}.items():
        (shown,) = [o["data"] for o in outputs[name] if o["output_type"] == "execute_result"]
        assert table in shown["text/html"] and "<table>" in shown["text/html"], name
        assert len(shown["text/html"]) < 8_000, name
        assert len(shown["text/plain"]) < 500, name
        assert len(str(outputs[name])) < 10_000, name
    assert "<svg" in str(outputs["optimized"])
    for name, kind in {"refused": "GateRefused", "wrong": "PipelineInvalid"}.items():
        (error,) = [o for o in outputs[name] if o["output_type"] == "error"]
        assert error["ename"] == kind
        assert len(error["traceback"]) == 1 and "\n" not in error["traceback"][0]
        assert error["traceback"][0].startswith(f"{kind}: quantize_static: ")
    (error,) = [o for o in outputs["debug"] if o["output_type"] == "error"]
    assert "Traceback (most recent call last)" in error["traceback"][0]
