"""`compress gc`: what was long unused goes, what is needed stays, also beside an upload."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from compress.artifacts.artifact import Artifact
from compress.common.errors import PipelineInvalid
from compress.pipelines.store.entry import Record, key_of
from compress.pipelines.store.gc import clean
from compress.pipelines.store.local import Store, store_lock
from compress.pipelines.store.remote import Objects, Remote, StoredFile

LONG_AGO = time.time() - 100 * 86_400


def _age(*folders: Path) -> None:
    for path in (p for folder in folders for p in (folder, *folder.rglob("*"))):
        os.utime(path, (LONG_AGO, LONG_AGO))


def _made(root: Path, model: Artifact, name: str, remote: Remote | None = None) -> Path:
    with Store(root, remote).locked() as store:
        entry = store.entry({"stage": name})
        shutil.copytree(model.path, entry.artifact_path)
        store.commit(name, entry, Record(parts={"stage": name}, digest=model.digest, seconds=1.0))
    return entry.path


@pytest.fixture
def mlp(finished_run) -> Artifact:
    return Artifact.from_directory(finished_run.out / "artifacts" / "train")


@pytest.fixture
def pruned(finished_run) -> Artifact:
    return Artifact.from_directory(finished_run.out / "artifacts" / "prune_channels")


def test_what_a_run_shows_or_has_used_lately_stays_and_the_rest_goes(project) -> None:
    store = project.out / ".store"
    project.edit("ratio: 0.4", "ratio: 0.7")
    project.run(until="prune_channels")
    (store / "work" / "given_up").mkdir(parents=True)
    (store / "work" / "given_up" / "state").write_bytes(b"0" * 1000)
    (store / f"{0:032x}").mkdir()  # of a stage that was interrupted
    _age(store)
    before = {p for p in store.rglob("*") if p.is_file()}

    cleaned = clean(str(project.out), "30d", True, print)
    assert before == {p for p in store.rglob("*") if p.is_file()}
    assert cleaned.dry_run and "would be removed" in next(iter(cleaned.lines()))
    done = clean(str(project.out), "30d", False, print)
    assert (done.artifacts, done.kept, done.bytes) == (
        cleaned.artifacts,
        cleaned.kept,
        cleaned.bytes,
    )
    # The other pruning, what it exported and the float export are gone, this run's three are not.
    assert (done.artifacts, done.kept) == (3, 3)
    assert done.bytes > 2000
    assert not (store / "work" / "given_up").exists() and not (store / f"{0:032x}").exists()
    project.edit("ratio: 0.7", "ratio: 0.4")
    project.run(until="prune_channels")
    assert project.ran() == {"prune_channels": "settings.ratio 0.7 → 0.4"}


def test_what_a_run_uses_is_young_again(project) -> None:
    with Store(project.out / ".store", folder=project.folder).locked() as store:
        (entry,) = (f for f in store.root.iterdir() if "export_onnx" in _told_of(f))
        _age(store.root)
        parts = json.loads((entry / "record.json").read_text())["parts"]
        assert store.get(store.entry(parts))
    shutil.rmtree(project.out / "artifacts")
    cleaned = clean(str(project.out), "30d", False, print)
    assert (cleaned.artifacts, cleaned.kept) == (4, 1)
    assert entry.exists()


def _told_of(entry: Path) -> str:
    record = entry / "record.json"
    return record.read_text() if record.exists() else ""


def test_a_run_at_work_is_waited_for(project) -> None:
    said: list[str] = []
    cleaner = threading.Thread(target=clean, args=(str(project.out), "0h", False, said.append))
    with store_lock(project.out / ".store", print):
        cleaner.start()
        cleaner.join(0.5)
        assert cleaner.is_alive()
    cleaner.join(60)
    assert not cleaner.is_alive()
    assert said == [f"waiting for another run in {project.out} to end (Ctrl-C gives up)"]


def test_a_shared_store_loses_what_is_old_and_no_file_that_another_artifact_has(
    mlp, pruned, tmp_path
) -> None:
    shared = tmp_path / "shared"
    url = f"file://{shared}"
    for name, model in {"old": mlp, "of both": pruned}.items():
        _made(tmp_path / "one" / ".store", model, name, Remote(url, print))
    (shared / "partial" / f"{'a' * 16}-{'b' * 32}").write_bytes(b"0" * 1000)
    _age(shared)
    _made(tmp_path / "two" / ".store", pruned, "young", Remote(url, print))
    _age(*(shared / "files").iterdir())  # written anew just now
    ours = {f.sha256 for f in pruned.manifest.files.values()}
    theirs = {f.sha256 for f in mlp.manifest.files.values()} - ours

    cleaned = clean(url, "30d", True, print)
    assert (cleaned.artifacts, cleaned.kept) == (2, 1)
    assert theirs <= {p.name for p in (shared / "files").iterdir()}
    assert clean(url, "30d", False, print).bytes == cleaned.bytes > 1000
    assert {p.name for p in (shared / "files").iterdir()} == ours
    assert [p.name for p in (shared / "manifests").iterdir()] == [f"{pruned.digest}.json"]
    assert [p.stem for p in (shared / "records").iterdir()] == [key_of({"stage": "young"})]
    assert not list((shared / "partial").iterdir())
    said: list[str] = []
    with Store(tmp_path / "three" / ".store", Remote(url, said.append)).locked() as store:
        assert store.get(store.entry({"stage": "young"}))
    assert not said


def test_what_others_have_put_into_a_shared_store_stays(mlp, tmp_path) -> None:
    shared = tmp_path / "shared"
    _made(tmp_path / "one" / ".store", mlp, "one", Remote(f"file://{shared}", print))
    theirs = [shared / name for name in ("files/a/b.txt", "records/README", "partial/x", "n.txt")]
    for file in theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"0")
    _age(shared)
    assert clean(f"file://{shared}", "30d", False, print).artifacts == 1
    assert {f for f in shared.rglob("*") if f.is_file()} == {shared / "format.json", *theirs}


def test_an_upload_relies_on_no_file_that_may_be_about_to_go(mlp, tmp_path, monkeypatch) -> None:
    shared = tmp_path / "shared"
    url = f"file://{shared}"
    _made(tmp_path / "one" / ".store", mlp, "one", Remote(url, print))
    _age(shared)
    look = Objects.look

    def upload_first(self: Objects, name: str) -> StoredFile | None:
        if name.startswith("files/"):  # all manifests have been read by now
            monkeypatch.setattr(Objects, "look", look)
            _made(tmp_path / "two" / ".store", mlp, "two", Remote(url, print))
        return look(self, name)

    monkeypatch.setattr(Objects, "look", upload_first)
    assert clean(url, "30d", False, print).artifacts == 1
    said: list[str] = []
    with Store(tmp_path / "three" / ".store", Remote(url, said.append)).locked() as store:
        assert store.get(store.entry({"stage": "two"})), said
        assert store.get(store.entry({"stage": "one"})) is None
    assert not said


@pytest.mark.parametrize(
    ("place", "older_than", "said"),
    [
        ("absent", "30d", r"^absent: holds no results of a run; expected its --out, or a URL$"),
        ("file:///absent/x", "30d", r"^file:///absent/x: there is no store$"),
        ("file:///absent/x", "1d", r"^--older-than 1d: a shared store keeps 2 days at least"),
        ("absent", "1y", r"^--older-than 1y: expected hours, days or weeks"),
        ("nosuch://x", "30d", "Protocol not known"),
    ],
)
def test_a_place_or_time_that_is_none_is_one_line(place, older_than, said) -> None:
    with pytest.raises(PipelineInvalid, match=said) as refused:
        clean(place, older_than, False, print)
    assert "\n" not in str(refused.value)
    assert not Path("absent").exists()
