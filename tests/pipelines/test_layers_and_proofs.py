"""What the page tells of layers, and a proof as a file."""

import json
import struct

import pytest
from safetensors.torch import load_file

from compress.common.errors import PipelineInvalid
from compress.pipelines.commands.verify import render_proof, verify_command
from compress.pipelines.reporting.html import layer_sensitivities, layer_sizes, render
from compress.pipelines.reporting.stage_rows import build_rows
from compress.pipelines.results.schema import Report
from compress.serve.verify import Proof, Replay


def test_sizes_by_layer_are_those_of_the_sealed_weights(finished_run) -> None:
    report = Report.read(finished_run.out)
    sizes = layer_sizes(build_rows(report), finished_run.out)
    assert sizes.columns == ("train", "prune_channels")
    shown = {name: [cell.text for cell in cells] for name, cells in sizes.rows}
    for column, stage in enumerate(("train", "prune_channels")):
        state = load_file(finished_run.out / "artifacts" / stage / "weights.safetensors")
        for layer in ("0", "2"):
            size = sum(t.nbytes for name, t in state.items() if name.startswith(f"{layer}."))
            assert shown[layer][column] == f"{size} B" or size >= 1000
    assert layer_sizes(build_rows(report), None) is None
    assert "Sizes by layer: not known" in render(report)


def test_a_layer_that_a_stage_removed_is_said_to_be_gone(finished_run, tmp_path) -> None:
    report = Report.read(finished_run.out)
    for stage, layers in (("train", "ab"), ("prune_channels", "b")):
        header = {f"{n}.weight": {"data_offsets": [0, 8]} for n in layers}
        raw = json.dumps({"__metadata__": {}, **header}).encode()
        file = tmp_path / "artifacts" / stage / "weights.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(struct.pack("<Q", len(raw)) + raw)
    shown = {
        n: [c.text for c in cells] for n, cells in layer_sizes(build_rows(report), tmp_path).rows
    }
    assert shown == {"a": ["8 B", "gone"], "b": ["8 B", "8 B"], "all layers": ["16 B", "8 B"]}


def test_what_stages_measured_of_layers_is_shown_most_sensitive_first(finished_run) -> None:
    report = Report.read(finished_run.out)
    facts = {
        "fidelity": {"layers": [{"module": m, "own_sqnr_db": v, "sqnr_db": v - 1} for m, v in
                                (("firm", 40.0), ("weak", 10.0))]},
        "mixed": {"layers": [{"module": "m", "sensitivity": None, "format": "float"}]},
        "harm_alone": {"block": {"points": 2.5, "distance": 0.1}},
        "refit": {"layers": {"w": [0.4, 0.1]}},
    }  # fmt: skip
    rows = build_rows(report)
    artifact = rows[0].report.artifact.model_copy(update={"facts": facts})
    rows = build_rows(
        report.model_copy(
            update={"stages": (report.stages[0].model_copy(update={"artifact": artifact}),)}
        )
    )
    tables, crowded = layer_sensitivities(rows)
    cells = [[(name, [c.text for c in row]) for name, row in table.rows] for table in tables]
    assert cells == [
        [("weak", ["10", "9"]), ("firm", ["40", "39"])],
        [("m", ["not measured", "float"])],
        [("block", ["2.5"])],
        [("w", ["0.4", "0.1"])],
    ]
    assert not crowded
    assert layer_sensitivities(build_rows(report))[0], "prune_channels refits layers"


@pytest.mark.parametrize("ending", [".html", ".md", ".json", ".proof"])
def test_a_proof_is_written_for_people_and_for_machines(
    finished_run, tmp_path, ending: str
) -> None:
    file = tmp_path / f"train{ending}"
    proof = verify_command(finished_run.out / "artifacts" / "train", report=file)
    text = file.read_text()
    if ending in (".json", ".proof"):
        assert Proof.model_validate_json(text) == proof
    else:
        for line in (*proof.proven, proof.sha256, proof.digest, "not started"):
            assert line in text


def test_a_proof_that_cannot_be_written_is_refused_before_anything_is_started(tmp_path) -> None:
    absent = (tmp_path / "absent" / "p.md", "is not a directory")
    for file, found in (absent, (tmp_path, "is there")):
        with pytest.raises(PipelineInvalid, match=rf"^--report .*{found}$"):
            verify_command(tmp_path / "no archive", report=file)


@pytest.mark.parametrize("ending", [".html", ".md"])
def test_a_proof_says_what_was_not_shown_and_how_far_answers_differ(ending: str) -> None:
    replay = Replay(what="the <probe>", samples=4, largest_difference=1.25e-7)
    fields = {"proven": ("it answers",), "unproven": ("the data: gone",)}
    fields |= {"served_by": "TorchServe", "replays": (replay,)}
    proof = Proof(kind="torchserve", sha256="0" * 64, **fields)
    text = render_proof(proof, "archive", ending)
    assert "one thing could not be shown" in text
    assert text.index("it answers") < text.rindex("Not proven") < text.index("the data: gone")
    assert "1.25e-07" in text
    assert ("&lt;probe&gt;" in text) is (ending == ".html")
    both = {"unproven": (*proof.unproven, "the code")}
    assert "2 things could not be shown" in render_proof(proof.model_copy(update=both), "a", ending)
    assert "Not proven" not in render_proof(proof.model_copy(update={"unproven": ()}), "a", ending)
