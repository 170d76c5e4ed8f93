from pathlib import Path

import pytest

from compress.core.errors import PipelineInvalid
from compress.core.factory import local_sources, resolve, sources_digest


def _write(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_finds_every_own_source_and_no_installed_one(tmp_path: Path) -> None:
    folder = _write(
        tmp_path,
        nets="import torch\nfrom parts import blocks\nimport parts.norms as n\ndef f(): ...\n",
        parts__blocks="from .deep import x\n",
        parts__deep="x = 1\n",
        parts__norms="from . import deep\n",
        unrelated="",
    )
    (folder / "parts" / "__init__.py").write_text("")
    found = local_sources("nets:f", folder)
    assert sorted(found) == [
        "nets.py",
        "parts/__init__.py",
        "parts/blocks.py",
        "parts/deep.py",
        "parts/norms.py",
    ]


def test_the_digest_follows_a_transitive_change(tmp_path: Path) -> None:
    folder = _write(tmp_path, nets="import helper\ndef f(): ...\n", helper="a = 1\n", other="")
    before = sources_digest(local_sources("nets:f", folder))
    (folder / "other.py").write_text("changed = 1\n")
    assert sources_digest(local_sources("nets:f", folder)) == before
    (folder / "helper.py").write_text("a = 2\n")
    assert sources_digest(local_sources("nets:f", folder)) != before


def test_two_folders_with_a_module_of_the_same_name(tmp_path: Path) -> None:
    a = _write(tmp_path / "a", same="from part import n\ndef f(): return n\n", part="n = 1\n")
    b = _write(tmp_path / "b", same="from part import n\ndef f(): return n\n", part="n = 2\n")
    assert resolve("same:f", a)() == 1
    assert resolve("same:f", b)() == 2
    assert resolve("same:f", a)() == 1


def test_an_edited_module_is_read_again(tmp_path: Path) -> None:
    folder = _write(tmp_path, edited="def f(): return 1\n")
    assert resolve("edited:f", folder)() == 1
    (folder / "edited.py").write_text("def f(): return 12345\n")
    assert resolve("edited:f", folder)() == 12345


def test_an_installed_factory_has_no_sources_to_carry() -> None:
    assert local_sources("torch.nn:Linear") == {}
    assert resolve("torch.nn:Identity")() is not None


def test_errors_say_where_and_what_there_is(tmp_path: Path) -> None:
    folder = _write(tmp_path, broken="import no_such_library\n", nets="def resnet(): ...\n")
    with pytest.raises(PipelineInvalid, match="No module named 'no_such_library'"):
        resolve("broken:f", folder)
    with pytest.raises(PipelineInvalid, match="No module named 'absent_module'"):
        resolve("absent_module:f", folder)
    with pytest.raises(PipelineInvalid, match="no callable 'resnte'; it has resnet"):
        resolve("nets:resnte", folder)
