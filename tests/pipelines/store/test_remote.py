"""A store that machines share: what one made another takes, and what is damaged nobody takes."""

import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.common.errors import CompressError, PipelineInvalid, Unavailable
from compress.common.sealed_json import load_sealed
from compress.pipelines import Pipeline
from compress.pipelines.commands.cache_miss import why
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.evaluator import MeasurementCache
from compress.pipelines.runner.run import preview_run
from compress.pipelines.store.entry import ANSWERS, Record, key_of
from compress.pipelines.store.local import Store
from compress.pipelines.store.remote import Objects, Remote
from compress.pipelines.system.jsonl_log import LOG, LogFile, log_handler

fork = multiprocessing.get_context("fork")
PARTS = {"stage": "made"}


class Machine:
    """A store of its own, a shared one, and what was said."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url, self.said = root / ".store", url, []
        self.remote = Remote(url, self.said.append)

    def make(self, model: Artifact, parts: dict[str, str] = PARTS) -> None:
        with Store(self.root, self.remote, announce=self.said.append).locked() as store:
            entry = store.entry(parts)
            shutil.copytree(model.path, entry.artifact_path, dirs_exist_ok=True)
            store.commit("made", entry, Record(parts=parts, digest=model.digest, seconds=1.0))
            MeasurementCache(entry, model).get_or_measure({"latency": 1}, lambda: 1.0)

    def find(self, parts: dict[str, str] = PARTS) -> Artifact | None:
        with Store(self.root, self.remote, announce=self.said.append).locked() as store:
            entry = store.entry(parts)
            found = store.get(entry)
            assert (entry.load() is not None) is (found is not None)
            assert entry.fetched_from in ("", self.url)
            assert not list(entry.path.rglob(".*")) if entry.path.exists() else True
            return found[0] if found else None


@pytest.fixture
def mlp(finished_run) -> Artifact:
    return Artifact.from_directory(finished_run.out / "artifacts" / "train")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def machine(tmp_path: Path, shared: Path):
    names = itertools.count()
    return lambda: Machine(tmp_path / f"machine{next(names)}", f"file://{shared}")


def _bytes_of(artifact: Artifact) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in artifact.path.rglob("*") if f.is_file()}


def test_what_one_machine_made_another_fetches_byte_by_byte(mlp, machine, shared) -> None:
    machine().make(mlp)
    second = machine()
    found = second.find()
    assert _bytes_of(found) == _bytes_of(mlp)
    assert not second.said
    assert {oct(f.stat().st_mode & 0o777) for f in found.path.rglob("*") if f.is_file()} == {
        "0o444"
    }
    assert second.find({"stage": "another"}) is None
    with Store(second.root, announce=second.said.append).locked() as store:
        entry = store.entry(PARTS)
        _, record = entry.load()
    assert record.seconds == 1.0
    assert not (entry.path / ANSWERS).exists(), "each machine measures for itself"
    shutil.rmtree(shared)
    assert second.find().digest == mlp.digest, "it lies here now"


def test_what_was_made_before_there_was_a_shared_store_is_uploaded(mlp, machine) -> None:
    first = machine()
    remote, first.remote = first.remote, None
    first.make(mlp)
    assert machine().find() is None
    first.remote = remote
    first.find()
    assert machine().find().digest == mlp.digest


def test_a_store_in_memory_is_a_url_like_any_other(mlp, tmp_path) -> None:
    url = f"memory://{tmp_path.name}"
    Machine(tmp_path / "one", url).make(mlp)
    assert _bytes_of(Machine(tmp_path / "two", url).find()) == _bytes_of(mlp)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "a flipped bit": _flip,
    "a missing end": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "an end too much": lambda file: file.write_bytes(file.read_bytes() + b" "),
    "nothing in it": lambda file: file.write_bytes(b""),
    "no file": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("folder", ["files", "manifests", "records"])
def test_what_is_damaged_is_named_never_used_and_made_anew(
    mlp, machine, shared, folder, damage
) -> None:
    machine().make(mlp)
    file = next((shared / folder).iterdir())
    DAMAGE[damage](file)
    second = machine()
    found = second.find()
    if folder == "records" and damage in ("no file", "an end too much", "a flipped bit"):
        # No record is no artifact; JSON may end in a space; a bit may be of the time it took.
        assert found is None or found.digest == mlp.digest
    else:
        assert found is None
        (line,) = second.said
        assert f"{second.url}/{folder}/{file.name}: " in line and "made anew" in line
        if folder == "files" and damage != "a flipped bit":
            assert "is missing" in line or "bytes, not" in line, "before it is fetched"
    second.make(mlp)
    third = machine()
    assert _bytes_of(third.find()) == _bytes_of(mlp), third.said
    assert not third.said


def _write_hostile(shared: Path, manifest: bytes) -> None:
    digest = hashlib.sha256(manifest).hexdigest()
    (shared / "manifests" / f"{digest}.json").write_bytes(manifest)
    record = Record(parts=PARTS, digest=digest, seconds=1.0)
    (shared / "records" / f"{key_of(PARTS)}.json").write_bytes(record.to_bytes())


@pytest.mark.parametrize(
    "name",
    ["../../../outside", "/tmp/outside", "a/../../outside", "a//b", "a\\b", "", ".", "nul\0"],
)
def test_a_manifest_may_name_files_of_its_own_folder_alone(mlp, machine, shared, name) -> None:
    machine().make(mlp)
    manifest = load_sealed((mlp.path / MANIFEST).read_bytes())
    manifest["files"][name] = next(iter(manifest["files"].values()))
    _write_hostile(shared, json.dumps(manifest).encode())
    before = {*shared.parent.rglob("*")}
    second = machine()
    assert second.find() is None
    assert "is not a file of an artifact" in second.said[0]
    after = {p for p in shared.parent.rglob("*") if second.root.parent not in (p, *p.parents)}
    assert after == before


@pytest.mark.parametrize("kind", ["more files", "more bytes", "another hash", "a kind of its own"])
def test_a_manifest_has_limits(mlp, machine, shared, kind) -> None:
    machine().make(mlp)
    manifest = load_sealed((mlp.path / MANIFEST).read_bytes())
    file = next(iter(manifest["files"].values()))
    if kind == "more files":
        manifest["files"] |= {f"file{i}": file for i in range(10_001)}
    elif kind == "more bytes":
        file["bytes"] = 2**60
    elif kind == "another hash":
        file["sha256"] = "../../../etc/passwd"
    else:
        manifest["kind"] = "os.system"
    _write_hostile(shared, json.dumps(manifest).encode())
    second = machine()
    assert second.find() is None
    assert len(second.said) == 1 and "\n" not in second.said[0] and "refused" in second.said[0]


def test_a_record_stands_for_its_own_key_alone(mlp, machine, shared) -> None:
    machine().make(mlp)
    other = {"stage": "another"}
    records = shared / "records"
    shutil.copy(records / f"{key_of(PARTS)}.json", records / f"{key_of(other)}.json")
    second = machine()
    assert second.find(other) is None
    assert "is not the record of this key" in second.said[0]


def _killed_at(machine: Machine, model: Artifact, step: int, half: bool) -> None:
    """Upload in a process that is killed at its n-th write, half of which is written."""
    write, steps = Objects.write, itertools.count()

    def die_in_half(path: str, content: bytes) -> None:
        Path(path).write_bytes(content[:100])
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: Objects, name: str, content: bytes | Path) -> None:
        if next(steps) == step:
            if not half:
                os.kill(os.getpid(), signal.SIGKILL)
            self._files.pipe_file = die_in_half
            self._files.put_file = lambda file, path: die_in_half(path, Path(file).read_bytes())
        write(self, name, content)

    Objects.write = counted
    machine.make(model)


@pytest.mark.parametrize("half", [False, True])
def test_an_upload_killed_anywhere_is_never_seen_by_halves(mlp, machine, shared, half) -> None:
    whole = 0
    for step in range(1, 20):
        shutil.rmtree(shared, ignore_errors=True)
        machine().find()  # makes the store
        first = machine()
        child = fork.Process(target=_killed_at, args=(first, mlp, step - 1, half))
        child.start()
        child.join(60)
        second = machine()
        found = second.find()
        assert not second.said
        if child.exitcode == 0:
            whole += 1
            assert found.digest == mlp.digest
            break
        assert child.exitcode == -signal.SIGKILL
        assert found is None, step
        first.find()  # the same command again
        assert machine().find().digest == mlp.digest
        assert not list((shared / "partial").iterdir())
    assert whole


def test_writers_of_one_key_with_other_bytes_leave_one_of_them_whole(
    mlp, machine, finished_run
) -> None:
    other = Artifact.from_directory(finished_run.out / "artifacts" / "prune_channels")
    machine().find()
    writers = [threading.Thread(target=machine().make, args=(m,)) for m in (mlp, other) * 4]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    reader = machine()
    assert reader.find().digest in (mlp.digest, other.digest)
    assert not reader.said


@pytest.mark.parametrize("closed", ["files", "records"])
def test_a_store_that_fails_in_mid_run_is_a_warning(mlp, machine, shared, tmp_path, closed) -> None:
    first = machine()
    first.find()
    if (shared / closed).exists():
        shutil.rmtree(shared / closed)
    (shared / closed).write_text("in the way")
    with log_handler(LogFile(tmp_path / LOG, "run", lambda: "train")):
        first.make(mlp)
        first.make(mlp, {"stage": "another"})
    (line,) = first.said
    logged = json.loads((tmp_path / LOG).read_text())
    assert (logged["level"], f"warning: {logged['message']}") == ("warning", line)
    assert "warning: store" in line and "the run goes on" in line and "NotADirectory" in line
    assert first.find().digest == mlp.digest


@pytest.mark.parametrize("found", ['{"format": 0}', '{"format": 99}', "{", "[]"])
def test_a_shared_store_of_another_format_is_refused(project, shared, found) -> None:
    shared.mkdir()
    (shared / "format.json").write_text(found)
    expected = r"store file://.*: is of format .* reads format 1; choose another, or remove it"
    url = f"file://{shared}"
    with pytest.raises(PipelineInvalid, match=expected) as error:
        project.run(store=url)
    assert error.value.exit_code == 2
    with pytest.raises(PipelineInvalid, match=expected):
        preview_run(Pipeline.from_yaml(project.file), project.out, RunOptions(store=url))


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("s3://KEY:se/cret@bucket/folder", PipelineInvalid, "AWS_PROFILE"),
        ("sftp://user:secret@host/folder", PipelineInvalid, "fsspec's configuration"),
        ("https://host/folder?signature=secret", PipelineInvalid, "holds a password or"),
        ("nosuch://bucket", PipelineInvalid, "Protocol not known: nosuch"),
        ("hdfs://host/folder", Unavailable, "\\.\\[remote\\]"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line(url, error, said) -> None:
    if error is Unavailable and __import__("importlib.util").util.find_spec("pyarrow"):
        pytest.skip("pyarrow is installed")
    with pytest.raises(error, match=said) as refused:
        Remote(url, print)
    assert "secret" not in str(refused.value) and "se/cret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_place_that_cannot_be_written_is_said_at_the_start(machine, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = Machine(tmp_path / "own", f"file://{tmp_path}/file/below")
    with pytest.raises(CompressError, match=r"store file://.*: cannot be .*without a shared store"):
        blocked.find()


def test_a_second_folder_is_wholly_cached_and_says_from_where(
    finished_run, tmp_path, shared
) -> None:
    url = f"file://{shared}"
    first, second = (_copy_of(finished_run, tmp_path / name) for name in ("first", "second"))
    first.run(store=url, until="prune_channels")
    assert first.ran() == {}
    shutil.rmtree(second.out)
    pipeline = Pipeline.from_yaml(second.file)
    foreseen = preview_run(pipeline, second.out, RunOptions(store=url))
    assert foreseen["prune_channels"] == f"cached (from {url})"
    assert foreseen["export_onnx"].startswith("runs (")
    assert why(pipeline, second.out, "train", url).does == f"cached (from {url})"
    assert not second.out.exists(), "to look ahead writes nothing"
    second.run(store=url, until="prune_channels")
    assert second.ran() == {}
    assert any(line.startswith(f"train: cached (from {url})") for line in second.said)
    assert [s.fetched_from for s in Report.read(second.out).stages] == [url, url]
    for name in ("source", "train", "prune_channels"):
        made, fetched = (
            Artifact.from_directory(p.out / "artifacts" / name) for p in (first, second)
        )
        assert _bytes_of(made) == _bytes_of(fetched)


def _copy_of(finished_run, folder: Path):
    return type(finished_run)(Path(shutil.copytree(finished_run.folder, folder)))
