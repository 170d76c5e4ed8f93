"""A file of another format than is read is named, with what to do with it."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from compress.checkpoint.loading import read_state_dict
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.export.aotinductor.package import load as load_compiled
from compress.export.imported.pt2_files import read_program
from compress.export.torchscript.file_io import load as load_torchscript
from compress.export.torchscript.file_io import quiet
from compress.pipelines.commands.init import InitOptions, write_draft

NET = nn.Linear(2, 2)
ROW = torch.ones(1, 2)
AS_WEIGHTS = "give it as the checkpoint, and as the model the function that builds it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    torch.save(NET.state_dict(), folder / "weights.pt")
    torch.save(NET.state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    with quiet():
        torch.jit.save(torch.jit.trace(NET, ROW), folder / "traced.pt")
    torch.export.save(torch.export.export(NET, (ROW,)), folder / "program.pt2")
    with torch.package.PackageExporter(folder / "package.pt") as exporter:
        exporter.save_text("texts", "x", "x")
    torch.save(NET.state_dict(), folder / "renamed.safetensors")
    (folder / "plain.pkl").write_bytes(pickle.dumps({"weight": np.ones(2)}))
    np.savez(folder / "arrays.npz", weight=np.ones(2))
    return folder


@pytest.mark.parametrize(
    ("read", "file", "named"),
    [
        (
            read_state_dict,
            "traced.pt",
            "not a file that torch.save wrote, but TorchScript: it is a whole",
        ),
        (read_state_dict, "program.pt2", "but a torch.export program: it is a whole model"),
        (read_state_dict, "package.pt", r"but a torch\.package: it is code, so open"),
        (
            read_state_dict,
            "renamed.safetensors",
            "not a readable safetensors file, but a file that",
        ),
        (read_state_dict, "plain.pkl", "but a pickle: write the weights with torch.save"),
        (read_state_dict, "arrays.npz", "but arrays of NumPy: write the weights with torch.save"),
        (load_torchscript, "weights.pt", f"not TorchScript, but .* torch.save wrote: {AS_WEIGHTS}"),
        (load_torchscript, "program.pt2", "not TorchScript, but a torch.export program"),
        (read_program, "traced.pt", "not a torch.export program, but TorchScript"),
        (lambda file: load_compiled(file, None, "cpu"), "program.pt2", "Inductor package, but a"),
    ],
)
def test_a_file_of_another_format_is_named_with_its_use(folder, read, file, named) -> None:
    with pytest.raises(ArtifactInvalid, match=named):
        read(folder / file)


@pytest.mark.parametrize("file", ["weights.pt", "old.pt"])
def test_a_truncated_file_is_not_called_another_format(folder, tmp_path, file) -> None:
    assert read_state_dict(folder / file).keys() == NET.state_dict().keys()
    content = (folder / file).read_bytes()
    (tmp_path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactInvalid, match=r"not a .*, or truncated \("):
        read_state_dict(tmp_path / file)


def test_init_says_how_weights_become_a_model(tmp_path) -> None:
    torch.save(NET.state_dict(), tmp_path / "weights.ckpt")
    with pytest.raises(PipelineInvalid, match=f"but a file that torch.save wrote: {AS_WEIGHTS}"):
        write_draft(tmp_path / "x.yaml", InitOptions(model=str(tmp_path / "weights.ckpt")))
