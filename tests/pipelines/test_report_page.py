"""The page of a run: plots, layers, the proof chain, and rows of stages that did not pass."""

import json
import math
import re
import struct
from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from pipelines.chain import links_of, source_of
from pipelines.curves import trainings_of
from pipelines.evidence import prove
from pipelines.layers import sensitivities_of, sizes_of
from pipelines.page import folded
from pipelines.plots import DRAWN_POINTS, FLOOR, LEFT, RIGHT, TOP, Axis, Point, curve, pareto
from pipelines.plots import scatter as scattered
from pipelines.proof_page import as_text
from pipelines.report import FailureReport, Report
from pipelines.rows import fronts_of, higher_is_better, hindrances, rows_of, shipped
from serve.proof import Proof, Replay


def points(*pairs: tuple[float, float], refused: tuple[int, ...] = ()) -> list[Point]:
    return [Point(str(i), f"p{i}", x, y, refused=i in refused) for i, (x, y) in enumerate(pairs)]


def scatter(found: list[Point], front: set[int]):
    return scattered(found, front, title="t", names=("x", "y"), shown=str)


def many(report: Report, branches: int = 40, named: str = "branch") -> Report:
    """Return a report with so many branches of the last stage, all alike but for their figures."""
    last = report.stages[-1]
    others = []
    for i in range(branches):
        m = last.measurements
        metric = m.metric.model_copy(update={"value": 1 + i / 100 - 0.05 * (i % 3 == 0)})
        update = {"metric": metric, "bytes": 1000 + 50 * i * i, "speedup": 4 - i / 20}
        measured = m.model_copy(update=update)
        changed = {"name": f"{named}-ratio-0.{i:02d}", "measurements": measured}
        others.append(last.model_copy(update=changed))
    return report.model_copy(update={"stages": (*report.stages, *others)})


def broken(report: Report) -> Report:
    """Return a report of which one stage was refused, one failed, and two were skipped."""
    last = report.stages[-1]
    refusal = last.verdicts[0].model_copy(update={"passed": False})
    refused = last.model_copy(update={"name": "worse", "verdicts": (refusal,)})
    failure = FailureReport(name="int8", stage="quantize_static", error="int8: no <samples> left")
    told = report.model_copy(
        update={
            "status": "failed",
            "error": failure.error,
            "failed_stage": failure,
            "stages": (*report.stages, refused),
        }
    )
    skipped = [
        SimpleNamespace(name=n, stage="export_onnx", because="int8") for n in ("int8_onnx", "mar")
    ]
    told.__dict__.update(skipped=skipped, failures=(failure,))
    return told


class Outline(HTMLParser):
    """What a page consists of, as far as readers without sight depend on it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.counts: dict[str, int] = {}
        self.ids: list[str] = []
        self.named: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        told = dict(attributes)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if "id" in told:
            self.ids.append(told["id"])
        if tag == "svg":
            assert told.get("aria-hidden") == "true" or told.get("role") == "img"
            self.named += (told.get("aria-labelledby") or "").split()
        self.links += [told[key] for key in ("href", "src") if key in told]


def test_the_front_is_what_nothing_beats() -> None:
    found = points((1, 0.8), (2, 0.9), (3, 0.85), (2, 0.9), (0.5, 0.95))
    assert pareto(found[:4], higher_is_better=True) == {0, 1, 3}, "equal points beat no other"
    assert pareto(found, higher_is_better=True) == {4}
    assert pareto(found[:4], higher_is_better=False) == {0}
    cheap = points((1, 0.8), (2, 0.9), (0.5, 0.95), refused=(2,))
    assert pareto(cheap, higher_is_better=True) == {0, 1}, "what is refused beats nothing"


def test_marks_stand_within_the_plot_and_labels_on_no_mark() -> None:
    found = points(*((10 ** (i / 5), math.sin(i)) for i in range(20)), refused=(3,))
    plot = scatter(found, pareto(found, higher_is_better=True))
    for mark in plot.marks:
        assert LEFT <= mark.x <= RIGHT
        assert TOP <= mark.y <= FLOOR
    assert plot.marks[3].shape == "refused"
    assert sorted(m.x for m in plot.marks) == [m.x for m in plot.marks], "x grows with the value"
    for label in plot.labels:
        for mark in plot.marks:
            beside = abs(label.x + 3.5 * len(label.text) - mark.x) >= 5 + 3.5 * len(label.text)
            assert beside or abs(label.y - 4.5 - mark.y) >= 9, (label, mark)
    steps = [tuple(map(float, corner.split(","))) for corner in plot.lines[0].split()]
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(steps))


def test_what_was_refused_far_off_stands_at_the_edge() -> None:
    found = points((1, 0.9), (2, 0.98), (3, 0.1), refused=(2,))
    plot = scatter(found, {0, 1})
    assert plot.beyond == 1
    assert plot.marks[2].y == FLOOR
    assert plot.marks[0].y - plot.marks[1].y > (FLOOR - TOP) / 2, "the choices have the room"
    near = scatter(points((1, 0.9), (2, 0.98), (3, 0.95), refused=(2,)), {0, 1})
    assert (near.beyond, FLOOR > near.marks[2].y > TOP) == (0, True)


def test_equal_points_share_a_label() -> None:
    plot = scatter(points((1, 1), (1, 1), (2, 0)), set())
    assert {label.text for label in plot.labels} == {"0, 1", "2"}
    assert not plot.lines


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0.9, 1.0, 0, 100), [0.9, 0.92, 0.94, 0.96, 0.98, 1.0]),
        (Axis(-3, 7, 0, 100), [-2, 0, 2, 4, 6]),
        (Axis(0.02, 30, 0, 100, log=True), [0.1, 1, 10]),
        (Axis(1e5, 1e6, 0, 100, log=True), [1e5, 2e5, 5e5, 1e6]),
    ],
)
def test_ticks_are_round(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)


def test_a_curve_breaks_where_nothing_was_measured() -> None:
    values = [(0, None), (1, 3.0), (2, 2.0), (3, math.nan), (4, 1.0)]
    plot = curve(values, title="loss", names=("epoch", "loss"), kept=4)
    assert [len(part.split()) for part in plot.lines] == [2, 2]
    assert [mark.title for mark in plot.marks] == ["kept epoch 4: 1.0000"]
    assert curve([(0, None)], title="", names=("", ""), kept=0) is None


def test_a_long_curve_is_thinned_and_keeps_the_kept_epoch_and_the_last() -> None:
    values = [(epoch, 1 / (epoch + 1)) for epoch in range(1001)]
    plot = curve(values, title="", names=("epoch", "loss"), kept=337)
    assert len(plot.lines[0].split()) <= DRAWN_POINTS + 2
    assert plot.marks
    assert plot.description.endswith("epoch 1000: 0.0010.")


def test_trainings_are_those_that_the_stages_wrote_down(walked) -> None:
    report = Report.read(walked.out)
    (training,) = trainings_of(rows_of(report), "accuracy")
    history = report.stages[0].artifact.facts["history"]
    assert (training.name, training.epochs) == ("train", 3)
    assert training.loss == (history[0]["loss"], history[-1]["loss"])
    assert len(training.plots) == 2
    assert f"{history[-1]['loss']:.4f}" in report.html()


def test_sizes_by_layer_are_those_of_the_sealed_weights(walked) -> None:
    report = Report.read(walked.out)
    sizes = sizes_of(rows_of(report), walked.out)
    assert sizes.columns == ("train", "prune_channels")
    shown = {name: [cell.text for cell in cells] for name, cells in sizes.rows}
    for column, stage in enumerate(("train", "prune_channels")):
        state = load_file(walked.out / "artifacts" / stage / "weights.safetensors")
        for layer in ("0", "2"):
            size = sum(t.nbytes for name, t in state.items() if name.startswith(f"{layer}."))
            assert shown[layer][column] == f"{size} B" or size >= 1000
    assert sizes_of(rows_of(report), None) is None
    assert "Sizes by layer: not known" in report.html()


def test_a_layer_that_a_stage_removed_is_said_to_be_gone(walked, tmp_path) -> None:
    report = Report.read(walked.out)
    for stage, layers in (("train", "ab"), ("prune_channels", "b")):
        header = {f"{n}.weight": {"data_offsets": [0, 8]} for n in layers}
        raw = json.dumps({"__metadata__": {}, **header}).encode()
        file = tmp_path / "artifacts" / stage / "weights.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(struct.pack("<Q", len(raw)) + raw)
    shown = {n: [c.text for c in cells] for n, cells in sizes_of(rows_of(report), tmp_path).rows}
    assert shown == {"a": ["8 B", "gone"], "b": ["8 B", "8 B"], "all layers": ["16 B", "8 B"]}


def test_what_stages_measured_of_layers_is_shown_most_sensitive_first(walked) -> None:
    report = Report.read(walked.out)
    facts = {
        "fidelity": {"layers": [{"module": m, "own_sqnr_db": v, "sqnr_db": v - 1} for m, v in
                                (("firm", 40.0), ("weak", 10.0))]},
        "mixed": {"layers": [{"module": "m", "sensitivity": None, "format": "float"}]},
        "harm_alone": {"block": {"points": 2.5, "distance": 0.1}},
        "refit": {"layers": {"w": [0.4, 0.1]}},
    }  # fmt: skip
    rows = rows_of(report)
    artifact = rows[0].report.artifact.model_copy(update={"facts": facts})
    rows = rows_of(
        report.model_copy(
            update={"stages": (report.stages[0].model_copy(update={"artifact": artifact}),)}
        )
    )
    tables, crowded = sensitivities_of(rows)
    cells = [[(name, [c.text for c in row]) for name, row in table.rows] for table in tables]
    assert cells == [
        [("weak", ["10", "9"]), ("firm", ["40", "39"])],
        [("m", ["not measured", "float"])],
        [("block", ["2.5"])],
        [("w", ["0.4", "0.1"])],
    ]
    assert not crowded
    assert sensitivities_of(rows_of(many(report)))[0], "prune_channels refits layers"


def test_the_chain_is_held_against_the_sealed_manifests(project) -> None:
    report = Report.read(project.out)
    rows = rows_of(report)
    assert [link.check for link in links_of(report, rows, project.out)] == ["agrees"] * 3
    reads = [link.read for link in links_of(report, rows, project.out)]
    assert reads[1:] == [stage.artifact.digest for stage in report.stages[:-1]]
    assert source_of(report)["artifact, digest"] == reads[0]
    assert source_of(report)["code, SHA-256"]
    assert "none" in source_of(report)["checkpoint"]

    lied = report.stages[1].artifact.model_copy(update={"sha256": "0" * 64})
    stages = [s.model_copy(update={"artifact": lied}) if s.name == "prune_channels" else s
              for s in report.stages]  # fmt: skip
    changed = report.model_copy(update={"stages": tuple(stages)})
    (project.out / "artifacts/export_onnx/manifest.json").unlink()
    links = links_of(changed, rows_of(changed), project.out)
    assert [link.check for link in links] == ["agrees", "differs", "not here"]
    assert "✗ differs" in changed.html(project.out)


def test_the_page_is_written_again_as_it_was(walked) -> None:
    assert Report.read(walked.out).html(walked.out) == (walked.out / "report.html").read_text()


@pytest.mark.parametrize("told", [lambda r: r, broken, many])
def test_every_table_and_plot_can_be_read_without_sight(walked, told) -> None:
    page = told(Report.read(walked.out)).html(walked.out)
    outline = Outline(page)
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(outline.headings))
    assert outline.counts["table"] == outline.counts["caption"]
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.named
    assert set(outline.named) <= set(outline.ids)
    assert "script" not in outline.counts
    assert not [link for link in outline.links if re.match(r"(\w+:|//)", link)]
    assert len(page) < 300_000


def test_what_did_not_pass_is_told_first_and_has_rows(walked) -> None:
    report = broken(Report.read(walked.out))
    rows = rows_of(report)
    assert [row.number for row in rows] == list(range(1, 8))
    assert [row.status for row in rows[2:]] == ["passed", "refused", "failed", *["skipped"] * 2]
    told = dict(hindrances(rows))
    assert told["int8"] == "no <samples> left"
    assert told["int8_onnx, mar"] == "skipped, as int8 did not pass"
    assert "worse" in told
    fronts = fronts_of(report, rows)
    assert {row.name for row in fronts.absent} == {"int8", "int8_onnx", "mar"}
    assert "worse" not in [row.name for row in (*fronts.by_size, *fronts.by_time)]
    assert "worse" not in [row.name for row in shipped(rows, fronts, "train")]
    assert "train" not in [row.name for row in shipped(rows, fronts, "train")]
    page = report.html()
    assert "no &lt;samples&gt; left" in page
    before_stages = page.partition("<h2>Stages")[0]
    assert "1 refused, 1 failed, 2 skipped" in before_stages
    for name in ("worse", "int8", "int8_onnx, mar"):
        assert f"<b>{name}</b>:" in before_stages
    for row in rows:
        assert f"</span>{folded(row.name)}</th>" in page


def test_the_members_of_the_fronts_are_named(walked) -> None:
    report = many(Report.read(walked.out))
    rows = rows_of(report)
    fronts = fronts_of(report, rows)
    page = report.html()
    by_size = page.partition("On the front by size")[2].partition("</p>")[0]
    by_time = page.partition("On the front by latency")[2].partition("</p>")[0]
    for told, members in ((by_size, fronts.by_size), (by_time, fronts.by_time)):
        assert re.findall(r"<b>\d+ (.+?)</b>", told) == [row.name for row in members]
        assert len(members) > 1
    for row in rows:
        better = [m for m in fronts.by_size if m.metric >= row.metric]
        beaten = any(m.measured.bytes <= row.measured.bytes for m in better)
        assert beaten, row.name
        assert row in fronts.by_size or "size" not in fronts.of(row)


def test_no_front_is_invented_where_nobody_tells_the_direction(walked) -> None:
    report = Report.read(walked.out)
    assert higher_is_better(report) is True
    for name, told, expected in (
        ("loss", None, False),
        ("mine:metric", None, None),
        ("mine:metric", False, False),
    ):
        spec = {"name": name, "arguments": {}, "higher_is_better": told}
        lock = {**report.lock, "settings": {**report.lock["settings"], "metric": spec}}
        other = report.model_copy(update={"lock": lock})
        assert higher_is_better(other) is expected
        if expected is None:
            assert "there is no front" in other.html()


def test_what_an_older_run_did_not_keep_is_said_to_be_missing(walked) -> None:
    report = Report.read(walked.out)
    for row in rows_of(report):
        assert len(row.measured.latency_ms.ventiles) == 19
        assert row.measured.latency_ms.ventiles[9] == pytest.approx(
            row.measured.latency_ms.p50, rel=1e-3
        )
        low, high = row.measured.speedup_interval
        assert min(row.measured.speedup_blocks) <= low * 1.001
        assert high <= max(row.measured.speedup_blocks) * 1.001
    content = report.model_dump(mode="json")
    for measured in (content["baseline"], *(s["measurements"] for s in content["stages"])):
        del measured["speedup_blocks"], measured["latency_ms"]["ventiles"]
    lock = {k: v for k, v in report.lock.items() if k != "source"}
    old = Report.model_validate({**content, "lock": lock})
    page = old.html(walked.out)
    assert "Not kept: nothing was measured" in page
    assert "code, SHA-256" not in page
    content["stages"][0] = report.stages[0].model_dump(mode="json")
    assert ">not kept<" in Report.model_validate({**content, "lock": lock}).html(walked.out)


def test_a_metric_that_is_not_finite_is_in_no_plot(walked) -> None:
    report = Report.read(walked.out)
    m = report.stages[-1].measurements
    nan = m.model_copy(update={"metric": m.metric.model_copy(update={"value": math.nan})})
    last = report.stages[-1].model_copy(update={"measurements": nan})
    told = report.model_copy(update={"stages": (*report.stages[:-1], last)})
    assert [row.name for row in fronts_of(told, rows_of(told)).absent] == [last.name]
    assert f"not measured: <b>3 {last.name}</b>" in told.html()


def test_a_run_that_made_nothing_has_a_page(walked) -> None:
    report = Report.read(walked.out)
    failure = FailureReport(name="source", stage="source", error="source: no such checkpoint")
    update = {"status": "failed", "error": failure.error, "failed_stage": failure}
    empty = report.model_copy(update={**update, "stages": (), "baseline": None, "test": None})
    page = empty.html(walked.out)
    assert "✗ source: no such checkpoint" in page
    assert "fewer than two artifacts" in page
    assert "No stage made an artifact" in page


@pytest.mark.parametrize("ending", [".html", ".md", ".json", ".proof"])
def test_a_proof_is_written_for_people_and_for_machines(walked, tmp_path, ending: str) -> None:
    file = tmp_path / f"train{ending}"
    proof = prove(walked.out / "artifacts" / "train", None, file)
    text = file.read_text()
    if ending in (".json", ".proof"):
        assert Proof.model_validate_json(text) == proof
    else:
        for line in (*proof.proven, proof.sha256, proof.digest, "not started"):
            assert line in text


@pytest.mark.parametrize("ending", [".html", ".md"])
def test_a_proof_says_what_was_not_shown_and_how_far_answers_differ(ending: str) -> None:
    replay = Replay(what="the <probe>", samples=4, largest_difference=1.25e-7)
    told = {"proven": ("it answers",), "unproven": ("the data: gone",)}
    told |= {"served_by": "TorchServe", "replays": (replay,)}
    proof = Proof(kind="torchserve", sha256="0" * 64, **told)
    text = as_text(proof, "archive", ending)
    assert "one thing could not be shown" in text
    assert text.index("it answers") < text.index("Not proven") < text.index("the data: gone")
    assert "1.25e-07" in text
    assert ("&lt;probe&gt;" in text) is (ending == ".html")
    both = {"unproven": (*proof.unproven, "the code")}
    assert "2 things could not be shown" in as_text(proof.model_copy(update=both), "a", ending)
    assert "Not proven" not in as_text(proof.model_copy(update={"unproven": ()}), "a", ending)
