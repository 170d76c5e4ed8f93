"""A stage that lacks a library is refused before it runs, in one wording, whoever calls it."""

import re
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from compress import Context, StageFailed, Unavailable
from compress.artifacts import kinds
from compress.common import requirements
from compress.common.requirements import Requirement, pip_install
from compress.pipelines.config.registry import stages
from tests.pipelines.config.test_settings_are_values import REQUIRED

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NEEDING = {
    "export_aot": "g++",
    "export_compressed_tensors": "compressed_tensors",
    "export_executorch": "executorch",
    "export_gguf": "gguf",
    "export_openvino": "openvino",
    "export_tensorrt": "tensorrt",
    "package_torchserve": "ts",
}


@pytest.mark.parametrize("name", NEEDING)
def test_a_stage_without_its_library_is_refused_before_it_reads_anything(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = stages()[name]
    stage = kind.model_validate({**REQUIRED.get(name, [{}])[0], "gates": []})
    monkeypatch.setattr(Requirement, "missing", lambda need: need.what == NEEDING[name])
    with pytest.raises(Unavailable) as raised:
        stage(None, Context(tmp_path))
    assert re.match(
        f"{name}: needs {re.escape(NEEDING[name])}, which is not installed; ", str(raised.value)
    )
    unmet = next(stage.unmet(Context(tmp_path)))
    assert str(raised.value) == f"{name}: {unmet.problem}", "a plan says the same of the file"


@pytest.mark.parametrize("name", stages())
def test_extras_that_a_stage_says_to_install_exist(name: str) -> None:
    stage = stages()[name].model_validate(REQUIRED.get(name, [{}])[0])
    for need in stage.all_requirements():
        assert need.install
        assert {*re.findall(r"\[(\w[\w-]*)\]'", need.install)} <= EXTRAS.keys()


@pytest.mark.parametrize(
    "name",
    [n for n, k in stages().items() if k.model_validate(REQUIRED.get(n, [{}])[0]).needs_data],
)
def test_a_stage_without_its_data_is_refused_before_it_reads_anything(
    name: str, tmp_path: Path
) -> None:
    stage = stages()[name].model_validate({**REQUIRED.get(name, [{}])[0], "gates": []})
    with pytest.raises(StageFailed, match=f"^{name} needs data"):
        stage(None, Context(tmp_path))


def test_the_command_fits_how_the_toolkit_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert pip_install("openvino") == "pip install -e '.[openvino]'"
    monkeypatch.chdir(tmp_path)
    assert pip_install("openvino") == f"pip install -e '{ROOT}[openvino]'"
    wheel = tmp_path / "site-packages" / "compress" / "common" / "requirements.py"
    monkeypatch.setattr(requirements, "__file__", str(wheel))
    assert pip_install("openvino") == "pip install 'compress-pipeline[openvino]'"


def test_an_installation_older_than_the_source_is_to_be_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requirements, "entry_points", lambda group: ())
    stages.cache_clear()
    try:
        with pytest.raises(Unavailable, match=r"names no stage of its own.*pip install -e \."):
            stages()
    finally:
        stages.cache_clear()


def test_a_stage_of_another_package_takes_no_name_of_this_toolkit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = EntryPoint("another", "compress.training.stage:Train", "compress.stages")
    both = (other, *entry_points(group="compress.stages"))  # found before this toolkit's
    monkeypatch.setattr(requirements, "entry_points", lambda group: both)
    stages.cache_clear()
    try:
        with pytest.raises(Unavailable, match=r"stage 'another' of .*:Train: the name is taken"):
            stages()
    finally:
        stages.cache_clear()


def test_an_unknown_kind_of_artifact_imports_stages_of_other_packages_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = EntryPoint("another", "another:Stage", "compress.stages")
    own = (*entry_points(group="compress.stages"),)
    loaded: list[EntryPoint] = []
    monkeypatch.setattr(
        kinds, "entry_points", lambda group, **_: (*own, other) if group == other.group else ()
    )
    monkeypatch.setattr(kinds, "load_entry_point", lambda entry, _: loaded.append(entry))
    assert kinds.artifact_class("of_no_package") is None
    assert loaded == [other]
