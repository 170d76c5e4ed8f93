"""`compress auto` with blocks that may be removed."""

import json
from pathlib import Path

import pytest
import yaml

from compress.common.errors import PipelineInvalid
from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
from compress.pipelines.auto.candidates import Candidate, CheckedModel
from compress.pipelines.auto.cost_models import DeeperModels, FormatModel, LatencyTables
from compress.pipelines.auto.front import Front
from compress.pipelines.config.auto_settings import AutoSettings, name_without_blocks
from compress.pipelines.config.pipeline import PipelineConfig
from compress.profiling.interaction_sum import InteractionSum
from tests.pipelines.auto.test_auto import FILE, NETS, auto
from tests.pipelines.auto.test_runtimes import run

BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 48, 3, padding=1), nn.Conv2d(48, 32, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.first(x))))

def residual():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Sequential(*(Block() for _ in range(3))),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2),
    )
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS + BLOCKS)
    content = FILE.replace("nets:net", "nets:residual")
    widths = '{values: 2, exclude: ["2.*.first"]}, formats: [float]'
    content = content.replace(
        "{values: 2}, formats: [float, int8_static]", f"{widths}, blocks: true"
    )
    (tmp_path / "net.yaml").write_text(content)
    return tmp_path / "net.yaml"


@pytest.mark.soak  # test_auto.py searches, and the others here have the rules
@pytest.mark.slow
def test_blocks_and_widths_are_decided_together(
    file: Path, tmp_path: Path, capfd, monkeypatch
) -> None:
    monkeypatch.setattr("compress.pipelines.auto.cost_models.FITTED_MODELS", 4)
    out = tmp_path / "out"
    assert auto(file, "--out", out, "--json") == 0
    front = json.loads(capfd.readouterr().out)
    checked = {model["name"]: model for model in front["checked"]}
    order = json.loads((out / "blocks.json").read_text())["content"]
    assert len(order) == 2 and {*order} < {f"2.{i}" for i in range(3)}
    removed = {tuple(model["removed_blocks"]) for model in checked.values()}
    assert removed == {(), (order[0],), (order[0], order[1])}
    both = [m for m in checked.values() if m["removed_blocks"] and m["widths"]]
    assert all(m["predicted_ms"] for m in both)
    point = next(m for m in both if m["name"] in front["points"])
    # Its pipeline makes the same file without a search.
    number = front["points"].index(point["name"]) + 1
    pipeline = out / "points" / str(number) / "pipeline.yaml"
    _, blocks, widths, _ = yaml.safe_load(pipeline.read_text())["stages"]
    assert blocks == {"stage": "prune_layers", "blocks": point["removed_blocks"], "refit": True}
    assert widths["widths"] == point["widths"]
    assert run(pipeline, tmp_path / "again") == 0
    again = tmp_path / "again" / "artifacts" / "export_onnx" / "model.onnx"
    made = out / "candidates" / point["name"] / "artifacts" / "export_onnx" / "model.onnx"
    assert again.read_bytes() == made.read_bytes()
    # A second search begins with what the first one found, also one that leaves all blocks.
    built: list[str] = []
    monkeypatch.setattr(
        CandidateEvaluator, "evaluate", lambda self, candidate, *_: built.append(candidate)
    )
    assert auto(file, "--out", out, "--json", "--time", "1s") == 0
    assert not built and json.loads(capfd.readouterr().out)["checked"] == front["checked"]
    file.write_text(file.read_text().replace("blocks: true", "blocks: false"))
    assert auto(file, "--out", out, "--json", "--time", "1s") == 0
    front = json.loads(capfd.readouterr().out)
    assert not built and not any(checked[name]["removed_blocks"] for name in front["points"])


@pytest.mark.parametrize(
    ("pattern", "after"),
    [
        ("2.0.first", "2.0.first"),
        ("2.4.first", "2.2.first"),
        ("2.*.first", "2.*.first"),
        ("2.1.first", None),
        ("3", "3"),
        ("21.4", "21.4"),
    ],
)
def test_patterns_of_names_are_those_after_the_removal(pattern: str, after: str | None) -> None:
    assert name_without_blocks(pattern, ("2.3", "2.1")) == after


def test_included_groups_that_leave_are_not_all_groups() -> None:
    space = {"widths": {"include": ["2.1.*", "2.2.first"], "exclude": ["2.1.second"]}}
    settings = AutoSettings.model_validate({"space": space})
    widths = settings.without_blocks(["2.1"]).space.widths
    assert widths is not None and (widths.include, widths.exclude) == (("2.1.first",), ())
    assert settings.without_blocks(["2.1", "2.2"]).space.widths is None
    assert settings.without_blocks([]) == settings


def test_removed_blocks_are_a_stage_before_widths(file: Path) -> None:
    base = PipelineConfig.from_yaml(file)
    candidate = Candidate("float", (("b", 4),), removed_blocks=("2.3", "2.1"))
    assert candidate.stages(base, base.auto or AutoSettings()) == [
        {"stage": "prune_layers", "blocks": ["2.3", "2.1"], "refit": True},
        {
            **{"stage": "prune_channels", "widths": {"b": 4}, "importance": "obs"},
            "exclude": ["2.*.first"],
        },
        {"stage": "export_onnx"},
    ]
    names = {c.name for c in (candidate, Candidate("float", candidate.widths), Candidate("float"))}
    without = Candidate("float", removed_blocks=("2.3",))
    assert without.is_smaller and len({*names, without.name, "float-whole"}) == 4
    figures = {"predicted_ms": None, "latency_ms": 2.0, "bytes": 10**6, "loss": 0.0, "drop": 0.0}
    checked = CheckedModel(
        name=candidate.name,
        format="float",
        widths={"b": 4},
        removed_blocks=["2.3", "2.1"],
        **figures,
    )
    assert checked.candidate == candidate
    line = "float, 2 blocks removed, 1 groups cut: 2 ms, 1 MB, drop 0 points"
    assert Front.line(checked) == line


def test_a_latency_model_is_of_one_number_of_blocks() -> None:
    none = InteractionSum(1.0, {})
    model = FormatModel("float", none, none, removed_blocks=("2.3",), whole={"a": 8})
    candidate = model.candidate({"a": 4})
    assert candidate == Candidate("float", (("a", 4),), removed_blocks=("2.3",))
    assert model.choice_of(candidate) == {"a": 4}
    assert model.choice_of(Candidate("float", (("a", 4),))) is None


def test_latency_tables_know_no_removed_blocks(file: Path, tmp_path: Path, capfd) -> None:
    settings = AutoSettings.model_validate({"space": {"blocks": True}})
    with pytest.raises(PipelineInvalid, match=r"auto\.space\.blocks: latency tables are of models"):
        LatencyTables.refuse_blocks(settings)
    assert auto(file, "--tables-only", "--out", tmp_path / "out") == 2
    assert "leave it out with --tables and --tables-only" in capfd.readouterr().err


def test_what_two_groups_change_together_is_that_of_the_deeper_network() -> None:
    terms = {("a", "b"): {(4, 3): -0.5}, ("a",): {(4,): -1.0}, ("b",): {(3,): -2.0}}
    deeper = FormatModel("float", InteractionSum(9.0, terms), InteractionSum(90.0, terms))
    known = DeeperModels({"onnx": deeper}, {"x": "b", "y": "a", "z": "c"})
    grid = {"x": (6, 3), "y": (8, 4), "z": (8, 4)}
    assert known.has_pair(("x", "y"), grid) and not known.has_pair(("x", "z"), grid)
    assert not known.has_pair(("x", "y"), grid | {"x": (6, 2)}), "another width"
    alone = InteractionSum(5.0, {("x",): {(3,): -1.5}, ("y",): {(4,): -0.5}})
    quantity = known.with_pairs(alone, deeper.latency_ms, grid)
    assert quantity({"x": 3, "y": 4, "z": 8}) == 5 - 1.5 - 0.5 - 0.5
    assert quantity({"x": 3, "y": 8, "z": 4}) == 3.5
