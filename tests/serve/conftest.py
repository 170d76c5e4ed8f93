"""TorchServe without torch, which only its answers that are tensors need."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compress.serve.torchserve.process import TorchServe


@pytest.fixture(scope="session", autouse=True)
def torchserve_without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let TorchServe import a stand-in of torch, in a second less, for archives that need none."""
    folder, start = tmp_path_factory.mktemp("stand-in"), TorchServe._start
    (folder / "torch.py").write_text("class Tensor: ...\n")

    def start_without_torch(server: TorchServe, java: str, packages: Path) -> None:
        with zipfile.ZipFile(server.mar) as archive:
            if "model.onnx" in archive.namelist():
                server._environment["PYTHONPATH"] = str(folder)
        start(server, java, packages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchServe, "_start", start_without_torch)
        yield
