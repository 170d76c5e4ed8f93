"""Archives that one reader would unpack otherwise than another are refused by each of ours."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.checkpoint.safe_zip import refuse_bomb
from compress.common.errors import ArtifactInvalid
from compress.serve.torchserve.mar_file import model_name_of, read_mar


def _zip(file: Path, *names: str) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(file, "w")
    for name in names:
        archive.writestr(name, b"0" * 1000)
    return archive


def _edited(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        _zip(file, "archive/data.pkl", "archive/data/0").close()
        file.write_bytes(edit(file.read_bytes()))

    return make


def _written_over(offset: int, bytes_: bytes) -> Callable[[Path], None]:
    return _edited(lambda content: content[:offset] + bytes_ + content[offset + len(bytes_) :])


def _unlisted(file: Path) -> None:
    """Write a member that TorchServe unpacks, which goes through the members from the first on."""
    with _zip(file, "handler.py", "archive/data.pkl") as archive:
        archive.filelist.pop(0)


def _unlisted_between(file: Path) -> None:
    with _zip(file, "archive/data.pkl", "handler.py", "archive/data/0") as archive:
        archive.filelist.pop(1)


def _unlisted_at_the_end(file: Path) -> None:
    with _zip(file, "archive/data.pkl", "handler.py") as archive:
        archive.filelist.pop()


DIFFERS = "has a header that differs from the directory"
READ_IN_TWO_WAYS = {
    "a member that is not listed": (_unlisted, "bytes 0 to 1040 are of no member"),
    "one between others": (_unlisted_between, "bytes 1046 to 2086 are of no member"),
    "one behind others": (_unlisted_at_the_end, "holds bytes that are of no member"),
    "no header in front": (_written_over(0, b"PK\1\2"), DIFFERS),
    "other flags in front": (_written_over(6, b"\x08"), DIFFERS),
    "another method in front": (_written_over(8, b"\x08"), DIFFERS),
    "another checksum in front": (_written_over(14, b"\0\0\0\0"), DIFFERS),
    "another size in front": (_written_over(22, b"\1"), DIFFERS),
    "another name in front": (_written_over(30, b"handler.py"), DIFFERS),
    "something before": (_edited(lambda content: b"PK\3\4" + content), "bytes 0 to 4 are of no"),
    "something behind": (_edited(lambda content: content + b"behind"), "bytes that are of no"),
    "a comment": (
        _edited(lambda content: content[:-2] + b"\7\0comment"),
        "holds bytes that are of no member",
    ),
}


@pytest.mark.parametrize("opened", [refuse_bomb, read_mar, model_name_of])
@pytest.mark.parametrize("crafted", READ_IN_TWO_WAYS)
def test_an_archive_that_reads_otherwise_from_its_beginning_is_refused(
    tmp_path, opened, crafted
) -> None:
    make, message = READ_IN_TWO_WAYS[crafted]
    make(tmp_path / "given.mar")
    with zipfile.ZipFile(tmp_path / "given.mar") as archive:
        assert archive.namelist(), "Python's reader takes it"
    with pytest.raises(ArtifactInvalid, match=message) as refused:
        opened(tmp_path / "given.mar")
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_python_and_torch_write_reads_the_same_from_either_end(tmp_path) -> None:
    given = tmp_path / "given"
    torch.save({"ü": torch.ones(1000), "y": torch.ones(1)}, given)
    refuse_bomb(given)  # padded by extra fields, each member described behind its content
    torch.jit.script(torch.nn.ReLU()).save(str(given))
    refuse_bomb(given)
    with zipfile.ZipFile(given, "w") as archive:
        with archive.open(zipfile.ZipInfo("ü"), "w", force_zip64=True) as member:
            member.write(b"large")
        archive.writestr("y", b"small")
    refuse_bomb(given)
    streamed = _Streamed(given.open("wb"))
    with streamed.file, zipfile.ZipFile(streamed, "w") as archive:
        archive.writestr("x", b"described behind it")
        archive.writestr("y", b"so too")
    refuse_bomb(given)


class _Streamed:
    """A file without seek."""

    def __init__(self, file) -> None:
        self.file, self.write, self.flush = file, file.write, file.flush
