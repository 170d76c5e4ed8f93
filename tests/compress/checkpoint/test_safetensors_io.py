from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress.checkpoint.loading import read_state_dict
from compress.checkpoint.safetensors_io import tensors_in, write_safetensors
from compress.common.errors import ArtifactInvalid


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


def _with_header(file: Path, header: str, content: bytes = b"\0" * 8) -> Path:
    text = header.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return file


ONE = '"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
HEADERS = {
    "a name twice": (f"{{{ONE}, {ONE}}}", "key 'w' stands twice"),
    "a key twice": (f'{{{ONE[:-1]}, "shape": [2]}}}}', "key 'shape' stands twice"),
    "shared bytes": (f"{{{ONE}, {ONE.replace('w', 'v', 1)}}}", "has bytes 0 to 8, expected from 8"),
    "a gap": (f"{{{ONE.replace('[0, 8]', '[4, 8]').replace('[2]', '[1]')}}}", "expected from 0"),
    "a terabyte": (f"{{{ONE.replace('[2]', '[2000000000000]')}}}", "not as long as its shape"),
    "a negative size": (f"{{{ONE.replace('[2]', '[-1, -2]')}}}", "greater than or equal to 0"),
    "no end": (f"{{{ONE.replace('[0, 8]', '[0, 4]').replace('[2]', '[1]')}}}", "4 bytes, and the"),
    "a list": ("[]", "truncated"),
    "depth": ("[" * 5000, "truncated"),
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_readers_could_take_in_two_ways_is_refused(
    tmp_path: Path, header: str
) -> None:
    text, words = HEADERS[header]
    file = _with_header(tmp_path / "w.safetensors", text)
    with file.open("rb", buffering=0) as stream, pytest.raises(ArtifactInvalid, match=words):
        tensors_in(stream)
    with pytest.raises(ArtifactInvalid, match=words):
        read_state_dict(file)


def test_the_whole_of_a_sound_header_is_taken(tmp_path: Path) -> None:
    file = _with_header(tmp_path / "w.safetensors", f"{{{ONE}}}")
    assert read_state_dict(file)["w"].shape == (2,)


def test_more_tensors_than_models_have_are_counted_and_not_parsed(file: Path, monkeypatch) -> None:
    monkeypatch.setattr("compress.checkpoint.safetensors_io.MOST_TENSORS", 1)
    with pytest.raises(ArtifactInvalid, match=r"it has \d tensors, expected at most 1"):
        read_state_dict(file)
