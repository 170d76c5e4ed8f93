import subprocess
import sys
from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid
from compress.common.factories import local_sources, resolve, sources_digest


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


def test_an_installed_module_is_not_that_of_a_folder_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = _write(tmp_path / "beside", shared_name="def f(): return 'beside'\n")
    installed = _write(tmp_path / "installed", shared_name="def f(): return 'installed'\n")
    monkeypatch.syspath_prepend(installed)
    assert resolve("shared_name:f", beside)() == "beside"
    assert resolve("shared_name:f")() == "installed"
    assert resolve("shared_name:f", beside)() == "beside"


def test_an_edited_module_is_read_again(tmp_path: Path) -> None:
    folder = _write(tmp_path, edited="def f(): return 1\n")
    assert resolve("edited:f", folder)() == 1
    (folder / "edited.py").write_text("def f(): return 2\n")
    assert resolve("edited:f", folder)() == 2, "neither size nor second of the file differ"


def test_what_an_import_read_is_known_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the current folder is another one now, or gone."""
    reads = "from pathlib import Path\nTEXT = (Path(__file__).parent / 'x').read_text()\n"
    folder = _write(tmp_path, reading=reads + "def f(): return TEXT\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    (folder / "x").write_text("1")
    monkeypatch.chdir(folder)
    first = resolve("reading:f", folder)
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert resolve("reading:f", folder) is first
    (folder / "x").write_text("2")
    assert resolve("reading:f", folder)() == "2"


def test_a_folder_without_init_is_a_package(tmp_path: Path) -> None:
    folder = _write(tmp_path, pkg__nets="from parts.blocks import k\ndef f(): return k\n")
    _write(tmp_path, parts__blocks="k = 1\n")
    assert sorted(local_sources("pkg.nets:f", folder)) == ["parts/blocks.py", "pkg/nets.py"]
    assert resolve("pkg.nets:f", folder)() == 1
    (folder / "parts/blocks.py").write_text("k = 2\n")
    assert resolve("pkg.nets:f", folder)() == 2


def test_a_factory_may_import_when_it_is_called(tmp_path: Path) -> None:
    folder = _write(
        tmp_path, lazy="def f():\n    import later\n    return later.x\n", later="x = 3"
    )
    assert resolve("lazy:f", folder)() == 3
    assert sorted(local_sources("lazy:f", folder)) == ["later.py", "lazy.py"]


def test_a_symlinked_module_keeps_its_name(tmp_path: Path) -> None:
    _write(tmp_path / "real", target="def f(): return 4\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "linked.py").symlink_to(tmp_path / "real" / "target.py")
    assert list(local_sources("linked:f", tmp_path / "here")) == ["linked.py"]
    assert resolve("linked:f", tmp_path / "here")() == 4


def test_our_own_packages_are_never_the_users(tmp_path: Path) -> None:
    from compress.common.errors import StageFailed

    folder = _write(tmp_path, mine="from compress.common.errors import StageFailed as f\n")
    (tmp_path / "compress").mkdir(exist_ok=True)
    (tmp_path / "compress" / "__init__.py").write_text("")
    assert list(local_sources("mine:f", folder)) == ["mine.py"]
    assert resolve("mine:f", folder) is StageFailed


def test_a_module_that_exits_is_an_error(tmp_path: Path) -> None:
    folder = _write(tmp_path, leaves="import sys\nsys.exit(0)\n")
    with pytest.raises(PipelineInvalid, match="SystemExit: 0"):
        resolve("leaves:f", folder)


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


SCRIPT = """
from pathlib import Path
from compress.common.factories import refuse_in_import, resolve

def build():
    return 3

{guard}{what}
"""


@pytest.mark.parametrize(
    "what", ['print(resolve("script:build", Path(__file__).parent)())', "refuse_in_import()"]
)
def test_a_script_that_imports_itself_is_told_to_guard_what_it_does(tmp_path: Path, what) -> None:
    script = _write(tmp_path, script=SCRIPT.format(guard="", what=what)) / "script.py"
    with pytest.raises(PipelineInvalid, match='under `if __name__ == "__main__":`'):
        resolve("script:build", tmp_path)
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":\n    ', what=what))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout in ("3\n", "")
    assert resolve("script:build", tmp_path)() == 3
