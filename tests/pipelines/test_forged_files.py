"""No byte of any file that a run leaves can be changed without being refused or made again."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.attack import forgeries
from compress.common.errors import ArtifactInvalid, CompressError, cause_lines
from compress.common.sealed_json import read_state, write_state
from compress.pipelines.commands.verify import EnclosingRun, verify_command
from compress.pipelines.results.schema import Report
from compress.pipelines.store.local import samples_changed

NEVER_READ = {"lock", "log.jsonl"}
"""Files that no result depends on."""


def files_of(out: Path) -> list[Path]:
    found = (file for file in sorted(out.rglob("*")) if file.is_file())
    return [file for file in found if file.name not in NEVER_READ]


def files_of_each_kind(out: Path) -> list[Path]:
    """Return the files of a run, of artifacts and entries with the same names those of one."""
    artifacts = [
        *(out / "artifacts").iterdir(),
        *(file.parent for file in out.rglob("record.json")),
    ]
    alike = {
        (folder.parent, *sorted(f.relative_to(folder) for f in files_of(folder))): folder
        for folder in sorted(artifacts)
    }
    others = {*artifacts} - {*alike.values()}
    return [file for file in files_of(out) if not others & {*file.parents}]


def refusal(act: Callable[[], object]) -> str:
    """Return the one line in which something is refused; empty where it is not."""
    try:
        act()
    except CompressError as error:
        (line,) = cause_lines(error)
        assert error.exit_code == 2 and len(line) < 1000
        return line
    return ""


def read_all(out: Path) -> None:
    """Read what a run has left, as `compress report` and `compress verify` do."""
    Report.read(out)
    for artifact in sorted((out / "artifacts").iterdir()):
        verify_command(artifact)


def is_noticed(project: Any, file: Path) -> bool:
    """Whether a changed file is refused, or no longer there after the next run."""
    changed = file.read_bytes()
    if file.suffix == ".hashes":  # they only explain why a stage runs
        return explanation_by(project.out / ".store", file) == ""
    refused = refusal(lambda: read_all(project.out))
    for _ in range(2):
        if stopped := refusal(partial(project.run, same_runtime=True)):
            return file.name in stopped or str(file.parent) in stopped
        assert not refusal(lambda: read_all(project.out)), "a run makes all good again"
        warned = any(file.name in line for line in project.said if line.startswith("warning: "))
        if refused or warned or not file.exists() or file.read_bytes() != changed:
            return True
        for answers in project.out.glob(".store/*/answers.json"):
            answers.unlink()  # what only measurements read, as the export of the float model
    return False


def explanation_by(store: Path, file: Path) -> str:
    """Return how many samples differ by a file of hashes, from data with none of these samples."""
    last = json.loads((store / "last.json").read_bytes())
    datas = (parts.get("data") for parts in last.values() if isinstance(parts, dict))
    before = next(filter(None, datas))
    (split,) = (n for n, s in before["splits"].items() if s["sha256"].startswith(file.stem))
    now: Any = SimpleNamespace(
        parts={"splits": {split: {"sha256": "", "samples": 1}}},
        hashes={split: np.zeros((1, 2), np.uint64)},
    )
    return samples_changed(store, before, now)


def try_all(
    project: Any,
    forge: Callable[[Path], object],
    chosen: Callable[[Path], list[Path]] = files_of_each_kind,
) -> list[str]:
    """Forge one file after the other in a copy of a run; return those that are not noticed."""
    out, kept = project.out, project.folder / "kept"
    shutil.copytree(out, kept)
    missed = []
    for name in [file.relative_to(out) for file in chosen(out)]:
        shutil.rmtree(out)
        shutil.copytree(kept, out)
        if forge(out / name) is not False and not is_noticed(project, out / name):
            missed.append(str(name))
        print(f"forged {name}: {'unnoticed' if str(name) in missed else 'noticed'}")
    return missed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_changed_byte_of_any_file_is_refused_or_made_again(project) -> None:
    hashes = project.out / ".store" / "samples"
    assert all(explanation_by(hashes.parent, file) for file in hashes.iterdir())
    assert try_all(project, forgeries.flip_a_byte) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_edited_figure_of_any_json_is_refused_or_measured_again(project) -> None:
    def edit(file: Path) -> bool:
        return file.suffix == ".json" and forgeries.edit_a_figure(file)

    assert try_all(project, edit) == []


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_more_changed_bytes_are_refused_or_made_again(project, seed) -> None:
    forge = partial(forgeries.flip_a_byte, seed=seed)
    assert try_all(project, forge, chosen=files_of) == []


def test_state_is_read_only_as_written_and_for_its_own_key(tmp_path: Path, caplog) -> None:
    file = tmp_path / "state.json"
    write_state(file, "key", {"a": [1, 2.5]})
    assert read_state(file, "key", dict[str, tuple[int, float]]) == {"a": (1, 2.5)}
    assert read_state(file, "other", dict[str, Any]) is None and not caplog.text
    assert read_state(tmp_path / "absent", "key", dict[str, Any]) is None and not caplog.text
    assert read_state(file, "key", dict[str, str]) is None
    assert "state.json: is of another version; it is not used" in caplog.text
    raw = file.read_bytes()
    for place in range(len(raw)):
        caplog.clear()
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert read_state(file, "key", dict[str, Any]) is None
        assert "state.json: is not as it was written" in caplog.text
        assert len(caplog.records) == 1


def test_a_circle_of_ancestors_in_a_report_ends(tmp_path: Path) -> None:
    run = EnclosingRun(tmp_path, "a", {}, {"a": "b", "b": "a"}, {})
    run.refuse_damaged_ancestors()
    (tmp_path / "artifacts" / "b").mkdir(parents=True)
    (tmp_path / "artifacts" / "b" / "manifest.json").write_text("{")
    with pytest.raises(ArtifactInvalid):
        run.refuse_damaged_ancestors()
