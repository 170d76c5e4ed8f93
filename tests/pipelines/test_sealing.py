"""What a run believes of what an earlier one wrote: nothing that was changed since."""

import hashlib
import json
import random
import shutil

import pytest

from compress.artifacts.artifact import Artifact
from compress.common.errors import ArtifactInvalid, GateRefused
from compress.common.sealed_json import dump_sealed, load_sealed
from compress.pipelines.results.comparison import compare
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.evaluator import MeasurementCache
from compress.pipelines.store.entry import ANSWERS, RECORD
from compress.pipelines.store.local import Store

FLIPS = 300


def flipped(raw: bytes, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def entries(project):
    return sorted(file.parent for file in (project.out / ".store").glob(f"*/{RECORD}"))


def made_by(project, stage: str):
    asked = f'"stage":"{stage}"'.encode()
    return next(e for e in entries(project) if asked in (e / RECORD).read_bytes())


def trained(project):
    return made_by(project, "train")


@pytest.mark.parametrize("name", [RECORD, ANSWERS])
def test_no_flipped_bit_is_taken(finished_run, tmp_path, name) -> None:
    """Of each of 300 flips, seeded, either file is refused, and the refusal is said."""
    folder = shutil.copytree(
        trained(finished_run), tmp_path / ".store" / trained(finished_run).name
    )
    said: list[str] = []
    store = Store(tmp_path / ".store", folder=finished_run.folder, announce=said.append)
    raw = (folder / name).read_bytes()
    parts = load_sealed((folder / RECORD).read_bytes())["parts"]
    question = json.loads(next(iter(load_sealed((folder / ANSWERS).read_bytes())["answers"])))
    found = store.get(store.entry(parts))
    assert found
    artifact = found[0]
    for bit in random.Random(0).sample(range(8 * len(raw)), FLIPS):
        (folder / name).write_bytes(flipped(raw, bit))
        said.clear()
        store.warnings.clear()
        if name == RECORD:
            assert store.get(store.entry(parts)) is None, bit
        else:
            before = (folder / name).read_bytes()
            cache = MeasurementCache(store.entry(parts), artifact)
            assert cache.get_or_measure(question, lambda: "anew") == "anew", bit
            assert (folder / name).read_bytes() != before
        assert len(said) == len(store.warnings) == 1, bit
        assert name in said[0] and "measured again" in said[0] and "\n" not in said[0]


def test_an_edited_figure_is_measured_again_and_the_gate_judges_the_true_one(project) -> None:
    project.edit("points: 50}]", "points: 50}, {gate: min_metric, at: 0.9999}]")
    with pytest.raises(GateRefused):
        project.run()
    for entry in entries(project):
        if not (entry / ANSWERS).exists():
            continue  # the model as it came in, which is not measured
        text = (entry / ANSWERS).read_text()
        answers = json.loads(text)["answers"]
        for asked in (key for key in answers if "min_metric" in key):
            value = answers[asked]["value"]["value"]
            assert value < 0.9999
            (entry / ANSWERS).write_text(text.replace(f"{value}", "0.99995"))
    with pytest.raises(GateRefused):
        project.run()
    assert project.ran() == {}, "artifacts are whole, and not made again"
    warnings = [line for line in project.said if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert ANSWERS in warnings[0] and "measured again" in warnings[0]
    report = Report.read(project.out)
    assert report.status == "refused"
    assert any(ANSWERS in warning for warning in report.warnings)


@pytest.mark.parametrize("damage", ["cut", "edited", "twice", "another's", "no seal", "empty"])
def test_a_record_that_does_not_fit_is_made_and_measured_again(project, damage) -> None:
    record = trained(project) / RECORD
    raw = record.read_bytes()
    content = load_sealed(raw)
    digest = content["digest"]
    another = next(e for e in entries(project) if e != record.parent)
    record.write_bytes(
        {
            "cut": raw[: len(raw) // 2],
            "edited": raw.replace(b'"seconds":', b'"seconds":1'),
            "twice": raw.replace(b'"digest":', b'"digest":"' + b"0" * 64 + b'","digest":'),
            "another's": (another / RECORD).read_bytes(),
            "no seal": json.dumps(content).encode(),
            "empty": b"",
        }[damage]
    )
    project.run()
    assert project.ran() == {"train": "its artifact or record is damaged"}
    (warning,) = (line for line in project.said if line.startswith("warning: "))
    assert str(record) in warning and "made and measured again" in warning
    assert load_sealed(record.read_bytes())["digest"] == digest


def test_a_record_and_its_figures_belong_to_one_artifact(project) -> None:
    one, other = (made_by(project, stage) for stage in ("prune_channels", "export_onnx"))
    shutil.copy(other / ANSWERS, one / ANSWERS)
    project.run()
    assert project.ran() == {}
    (warning,) = (line for line in project.said if line.startswith("warning: "))
    assert f"{one / ANSWERS} is that of another artifact" in warning
    shutil.rmtree(one / "artifact")
    shutil.copytree(other / "artifact", one / "artifact")
    Artifact.from_directory(one / "artifact").verify()
    project.run()
    assert list(project.ran().values()) == ["its artifact or record is damaged"]


@pytest.mark.parametrize("name", ["report.json", "lock.json"])
def test_an_edited_report_is_neither_shown_nor_compared(project, finished_run, name) -> None:
    file = project.out / name
    edited = file.read_text().replace('"status": "passed"', '"status": "failed"', 1)
    edited = edited if name == "report.json" else edited.replace('"seed": 0', '"seed": 1')
    assert edited != file.read_text()
    file.write_text(edited)
    for reading in (Report.read, lambda out: compare(finished_run.out, out)):
        with pytest.raises(ArtifactInvalid, match=r"is not as .*; run the pipeline again"):
            reading(project.out)


def test_what_a_stage_was_last_made_of_is_believed_only_as_written(project) -> None:
    file = project.out / ".store" / "last.json"
    file.write_bytes(flipped(file.read_bytes(), 800))
    project.edit("epochs: 3", "epochs: 4")
    project.run(until="train")
    assert project.ran() == {"train": "not run before"}


@pytest.mark.parametrize("indent", [None, 1])
def test_sealing_gives_back_what_was_sealed(indent) -> None:
    content = {"a": [1, 2.5, None, "é", "\udc80", float("inf")]}
    raw = dump_sealed(content, indent)
    assert load_sealed(raw) == content
    body = raw.rpartition(b',\n "sha256"')[0]
    assert json.loads(raw) == {**content, "sha256": hashlib.sha256(body).hexdigest()}
    for other in (raw + b" ", raw[:-1], b"", b"[]", b"7", b"{}", b"[" * 100_000):
        with pytest.raises(ArtifactInvalid):
            load_sealed(other)


def test_a_figure_is_measured_again_where_what_was_read_for_it_has_changed(
    finished_run, tmp_path
) -> None:
    artifact = Artifact.from_directory(finished_run.out / "artifacts" / "train")
    weight, asked = tmp_path / "weight.txt", []

    def measure() -> float:
        asked.append(1)
        return float(weight.read_text())

    for content, measured in (("1.0", 1), ("1.0", 1), ("0.5", 2), ("0.5", 2)):
        weight.write_text(content)
        entry = Store(tmp_path / ".store", folder=tmp_path).entry({"stage": "any"})
        entry.path.mkdir(parents=True, exist_ok=True)
        cache = MeasurementCache(entry, artifact)
        assert cache.get_or_measure({"metric": 1}, measure) == float(content)
        assert len(asked) == measured
