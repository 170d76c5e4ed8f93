"""What counts as the user's code, and which version of a package a name stands for."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

from compress.common import code_origin
from compress.common.code_origin import identify, is_installed, locate, origin_of

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = Path(np.__file__).parents[1]


def install(place: Path, version: str, source: str = "WIDTH = 8\n", name: str = "layers") -> Path:
    """Write a package of one module as pip does."""
    place.mkdir(exist_ok=True)
    for old in place.glob(f"{name}-*.dist-info/*"):
        old.unlink()
    for old in place.glob(f"{name}-*.dist-info"):
        old.rmdir()
    (place / f"{name}_of_ours.py").write_text(source)
    info = place / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(
        f"{name}_of_ours.py,sha256={hash(source)},1\n{info.name}/RECORD,,\n"
    )
    return place / f"{name}_of_ours.py"


def test_what_pip_put_anywhere_is_installed_and_what_lies_beside_it_is_not(tmp_path) -> None:
    module = install(tmp_path / "target", "1.0")
    beside = module.with_name("mine.py")
    beside.write_text("")
    elsewhere = tmp_path / "lib" / "site-packages" / "pkg" / "x.py"
    assert origin_of(str(module)) == origin_of(str(elsewhere)) == origin_of(np.__file__) == "other"
    assert origin_of(str(beside)) == "user"
    assert origin_of(str(ROOT / "compress" / "common" / "errors.py")) == "own"
    assert identify(str(module)) == "layers 1.0"
    assert identify(np.__file__) == f"numpy {np.__version__}"


def test_a_linked_package_is_the_users_code(tmp_path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "linked.py").write_text("")
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "linked.py").symlink_to(tmp_path / "src" / "linked.py")
    assert origin_of(str(packages / "linked.py")) == "user"


def test_a_package_without_metadata_is_known_by_its_file(tmp_path) -> None:
    copied = tmp_path / "site-packages" / "copied.py"
    copied.parent.mkdir()
    copied.write_text("A = 1\n")
    assert identify(str(copied)).startswith("sha256 ")


def test_a_reinstalled_folder_changes_without_a_new_version(tmp_path) -> None:
    found = []
    for count in range(2):
        module = install(tmp_path / f"target{count}", "1.0", f"WIDTH = {count}\n")
        (module.parent / "layers-1.0.dist-info" / "direct_url.json").write_text("{}")
        found.append(identify(str(module)))
    assert found[0] != found[1]
    assert all(name.startswith("layers 1.0 (") for name in found)


def test_names_are_looked_for_beside_the_pipeline_first(tmp_path) -> None:
    assert locate("numpy.linalg", tmp_path) == ("numpy", np.__file__)
    assert locate("none_such.part", tmp_path) == ("none_such", None)
    assert locate("json", tmp_path) is locate("compress.core", tmp_path) is None
    (tmp_path / "numpy.py").write_text("")
    assert locate("numpy.linalg", tmp_path) == ("numpy", str(tmp_path / "numpy.py"))


USES = """
import layers_of_ours, numpy
try:
    import optional_of_ours
except ImportError:
    optional_of_ours = None
import beside
def make():
    import importlib
    importlib.import_module("lazy_of_ours")
    return numpy.ones(layers_of_ours.WIDTH)
"""
RECORD = """
import json, sys
from pathlib import Path
from compress.common.dependency_recorder import Dependencies, recording
from compress.common.factories import resolve
here, known = Path(sys.argv[1]), Path(sys.argv[1]) / "known.json"
if known.exists():
    print(Dependencies.model_validate_json(known.read_text()).change(here))
else:
    with recording() as found:
        resolve("uses:make", here)()
        numpy = sys.modules["numpy"]
        (here / "beside.py").write_text("B = 2\\n")
        resolve("uses:make", here)()
    assert sys.modules["numpy"] is numpy and sys.modules["beside"].B == 2
    (here / "beside.py").write_text("B = 1\\n")
    depends = found.dependencies(here)
    print(sorted(depends.files), depends.modules)
    known.write_text(depends.model_copy(update={"files": {}}).model_dump_json())
"""


class Process:
    """Starts processes of a Python that finds packages elsewhere."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.first = folder / "user", folder / "first"
        self.packages, self.python = folder / "second", sys.executable
        path = [str(self.first), str(ROOT), str(self.packages)]
        if how == "PYTHONPATH of site-packages":
            self.python = sys._base_executable
            path.append(str(PACKAGES))
        elif how == "system-site-packages":
            # A .pth file imitates packages of the base environment, which has none here.
            venv.create(folder / "venv", with_pip=False, system_site_packages=True)
            self.python = str(folder / "venv" / "bin" / "python")
            base = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
            own = Path(sysconfig.get_path("purelib", vars=base))
            (own / "others.pth").write_text(f"{PACKAGES}\n")
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        install(self.packages, "1.0")
        install(self.packages, "0.1", name="lazy")
        self.folder.mkdir()
        (self.folder / "uses.py").write_text(USES)
        (self.folder / "beside.py").write_text("B = 1\n")

    def __call__(self) -> str:
        command = [self.python, "-c", RECORD, str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.mark.parametrize(
    "how",
    [
        "as it is",
        pytest.param("PYTHONPATH of site-packages", marks=pytest.mark.slow),
        pytest.param("system-site-packages", marks=pytest.mark.slow),
    ],
)
def test_packages_found_anywhere_count_by_their_version_and_are_never_imported_anew(
    tmp_path, how
) -> None:
    run = Process(tmp_path, how)
    assert run() == str(["beside.py", "uses.py"]) + " " + str(
        {
            "beside": "beside.py",
            "layers_of_ours": "layers 1.0",
            "lazy_of_ours": "lazy 0.1",
            "numpy": f"numpy {np.__version__}",
            "optional_of_ours": None,
            "uses": "uses.py",
        }
    )
    assert run() == ""
    install(run.packages, "1.1")
    assert run() == "module layers_of_ours: layers 1.0 → layers 1.1"
    install(run.packages, "1.0")
    if how == "as it is":
        install(run.packages, "3.0", name="optional")
        assert run() == "module optional_of_ours: not installed → optional 3.0"
        (run.packages / "optional_of_ours.py").unlink()
        install(run.first, "2.0")
        assert run() == "module layers_of_ours: layers 1.0 → layers 2.0"
        (run.first / "layers_of_ours.py").unlink()
        (run.folder / "layers_of_ours.py").write_text("WIDTH = 9\n")
        assert run() == "module layers_of_ours: layers 1.0 → layers_of_ours.py"


def test_no_record_is_read_for_what_lies_in_site_packages(monkeypatch) -> None:
    # Those of all packages take half a second.
    code_origin._folder_around.cache_clear()
    monkeypatch.setattr(code_origin, "_recorded", lambda folder: pytest.fail(f"reads {folder}"))
    assert is_installed(np.__file__) and is_installed(str(PACKAGES / "a_module.py"))
