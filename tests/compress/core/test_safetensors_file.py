from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress.core.errors import ArtifactInvalid
from compress.core.safetensors_file import tensors_in, write_safetensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    weight = torch.randn(3, 5)
    state = {
        "weight": weight,
        "tied": weight,
        "half": torch.randn(4).bfloat16(),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "small": torch.randn(2).to(torch.float8_e4m3fn),
    }
    write_safetensors(tmp_path / "w.safetensors", state)
    return tmp_path / "w.safetensors"


def test_tensors_are_read_as_the_library_reads_them(file: Path) -> None:
    expected = load_file(file)
    with file.open("rb", buffering=0) as stream:
        found = {name: stored.read() for name, stored in tensors_in(stream).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        same = (found[name].float() == tensor.float()).all()
        assert same, name


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_half_a_file_is_refused(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with (
        file.open("rb", buffering=0) as stream,
        pytest.raises(ArtifactInvalid, match=r"w\.safetensors: .*truncated"),
    ):
        [stored.read() for stored in tensors_in(stream).values()]
