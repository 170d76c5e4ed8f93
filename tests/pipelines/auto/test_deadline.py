"""The end of a search's time: what is stopped there, what is not begun, and what is said of it."""

import errno
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.core.progress import silent
from compress.pipelines.auto import candidate_evaluator, search, search_state
from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
from compress.pipelines.auto.candidates import Candidate, CheckedModel
from compress.pipelines.auto.cost_models import FormatModel
from compress.pipelines.auto.deadline import OutOfTime, progress_until
from compress.pipelines.auto.front import (
    Refusal,
    front_page,
    lines_below,
    nothing_found,
    write_points,
)
from compress.pipelines.auto.search_state import BlockVariant, SearchState, Solution
from compress.pipelines.config.auto_settings import AutoSettings
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions
from compress.profiling.benchmark import NotMeasurable
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.importance import remembered_scores
from compress.pruning.latency.solver import Programme
from tests.pipelines.auto.test_auto import FILE, NETS
from tests.pipelines.auto.test_limits import checked, front_of

OVER = -math.inf  # a deadline that is over


def state_of(out: Path, **members: Any) -> SearchState:
    settings = AutoSettings.model_validate({"limits": {"latency": "2ms"}, "time": "10s"})
    defaults = {"settings": settings, "out": out, "conditions": "", "base_ms": 1.0, "tables": None}
    defaults["decided_on"] = SimpleNamespace(samples=30, points_of_sample=1.0)
    return SearchState(SimpleNamespace(**(defaults | members)))


def test_progress_is_passed_on_until_the_time_is_over() -> None:
    steps: list[str] = []
    progress = progress_until(time.monotonic() + 60, lambda *step: steps.append(str(step[-1])))
    progress("latency of float", 1, 4, "export")
    assert steps == ["export"]
    with pytest.raises(StageFailed, match=r"no more time \(latency of float, export 1 of 4\)"):
        progress_until(time.monotonic() - 1, silent)("latency of float", 1, 4, "export")
    progress_until(OVER, lambda *step: steps.append(step[0]))("channels", 6, 6)
    assert steps == ["export", "channels"], "what is done is not thrown away"


def test_a_model_that_there_is_no_time_to_make_is_left_out_and_may_be_made_later(
    tmp_path: Path,
) -> None:
    deadlines: list[float] = []

    def evaluate(candidate: Candidate, predicted_ms: float | None, deadline: float) -> None:
        deadlines.append(deadline)
        raise OutOfTime("quantize_static: there was no more time (calibrate, step 1 of 2)")

    state = state_of(tmp_path, evaluate=evaluate)
    state.last_moment = 7.0
    state.check(Candidate("int8_static"))
    assert state.not_searched[0].startswith("int8_static-whole: quantize_static: there was no")
    assert not state.failed and not state.checked
    state.check(Candidate("int8_static"))
    assert deadlines == [7.0, 7.0]


def test_a_format_that_cannot_be_measured_ends_no_search(tmp_path: Path) -> None:
    def evaluate(candidate: object, predicted_ms: object, deadline: object) -> None:
        raise StageFailed("the latency is not measurable on this machine now")

    state = state_of(tmp_path, evaluate=evaluate)
    with pytest.raises(StageFailed, match="not measurable"):
        state.check(Candidate("float"))  # with which all others are compared
    state.check(Candidate("int8_static"))
    assert state.failed == {
        Candidate("int8_static"): "the latency is not measurable on this machine now"
    }
    # Nothing is known of a smallest model then.
    space: Any = SimpleNamespace(grid={"0": (32, 16)}, whole={"0": 32})
    variants = search.BlockVariants(state, BlockVariant((), None, space))
    assert variants.are_feasible(time.monotonic() + 60)


def test_a_full_disk_ends_a_search_and_a_model_that_fails_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "weights")
    causes = [full, ValueError("a width of 3")]

    def fail(*_: object, **__: object) -> Any:
        raise StageFailed(f"prune_channels: {causes[0]}") from causes[0]

    members: dict[str, Any] = {"context": Context(root=tmp_path), "model": None}
    state = state_of(tmp_path, evaluate=fail, measure_latency_ms=None, **members)
    state.checked["a"] = checked("a", 1.0, format="int8_static")
    monkeypatch.setattr(BlockVariant, "from_model", fail)
    monkeypatch.setattr(search_state, "build_format_models", fail)
    monkeypatch.setattr(state, "_layer_sensitivity", lambda *_: "some")
    space: Any = SimpleNamespace(grid={"0": (32, 16)})
    steps = {
        "int8_static": lambda: state.check(Candidate("int8_static")),
        "widths": lambda: search._search_variants(state, OVER),
        "int8_static is not cut": lambda: state.measure_kernels(BlockVariant((), None, space)),
    }
    for step in steps.values():
        with pytest.raises(StageFailed, match="No space left on device"):
            step()
    assert not (state.failed or state.not_searched)
    del causes[0]
    for step in steps.values():
        step()
    assert {*state.failed.values()} == {"prune_channels: a width of 3"}
    shown = "".join(state.not_searched)
    assert "widths: prune_channels: a width" in shown and "int8_static is not cut: prune" in shown


def test_the_float_model_is_made_however_long_it_takes(tmp_path: Path) -> None:
    deadlines: list[float] = []

    def evaluate(candidate: Candidate, predicted_ms: float | None, deadline: float) -> Any:
        deadlines.append(deadline)
        return checked("float-whole", 1.0)

    state = state_of(tmp_path, evaluate=evaluate)
    state.last_moment = 7.0
    state.check(Candidate("float"))
    assert deadlines == [math.inf]


def test_a_deadline_stops_the_run_that_makes_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(candidate: object, base: object, settings: object, out: object, options: Any) -> None:
        options.progress("calibrate", 1, 2)

    monkeypatch.setattr(candidate_evaluator, "_run", run)
    members: Any = dict.fromkeys(CandidateEvaluator.__dataclass_fields__) | {
        "options": RunOptions()
    }
    with pytest.raises(OutOfTime):
        CandidateEvaluator(**members).evaluate(Candidate("int8_static"), None, OVER)


def test_a_model_is_not_begun_that_takes_longer_than_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    wide, narrow = (Candidate("float", (("0", width),)) for width in (32, 16))
    quick = Candidate("int8_static", float_layers=("1",))

    def evaluate(candidate: Candidate, predicted_ms: object, deadline: object) -> CheckedModel:
        made.append(candidate.name)
        time.sleep(0.2 if candidate.is_smaller else 0.0)
        return checked(candidate.name, 1.0, drop=9.0, **candidate.settings())

    state = state_of(tmp_path, evaluate=evaluate)
    for solutions in ([wide], [narrow, quick], [narrow]):
        left = [*solutions]

        def solve(*_: object, left: list[Candidate] = left) -> Solution | None:
            return Solution(left.pop(0), 1.0, 0.0) if left else None

        monkeypatch.setattr(state, "solve", solve)
        monkeypatch.setattr(search, "latency_targets", lambda state: [1.0, 2.0])
        is_first = solutions == [wide]
        search._check_next(state, {}, time.monotonic() + (60 if is_first else 0.1))
    assert made == [wide.name, quick.name]
    assert state.not_searched == [
        "further models: to make one takes longer than there was left; allow more --time"
    ]


def test_what_single_cuts_lose_gets_a_share_of_what_is_left_where_little_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []

    def programmes(deadline: float) -> dict[tuple[str, ...], Programme]:
        deadlines.append(deadline)
        return {}

    state = state_of(tmp_path)
    state.models = {("float", "onnx", ()): None}  # none is solved for
    monkeypatch.setattr(search, "_check_next", lambda *_: False)
    variants: Any = SimpleNamespace(
        shallower=[], added=[None], programmes=programmes, add=lambda deadline: None
    )
    now = time.monotonic()
    search._check_cut(state, variants, now + 4)  # of 10 s
    assert deadlines == [
        pytest.approx(now + search.FIRST_SHARE * 4, abs=0.1),
        pytest.approx(now + search.SENSITIVITY_SHARE * 4, abs=0.1),
    ]


def test_no_format_is_measured_once_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(progress=silent, threads=1)
    state = state_of(tmp_path, context=context)
    for format in ("float", "int8_static"):
        state.checked[f"{format}-whole"] = checked(f"{format}-whole", 1.0, format=format)
    begun: list[object] = []
    monkeypatch.setattr(state, "_layer_sensitivity", begun.append)
    monkeypatch.setattr(search_state, "build_format_models", begun.append)
    space: Any = SimpleNamespace(grid={"0": (32, 16)})
    state.measure_kernels(BlockVariant((), None, space), time.monotonic())
    assert not begun
    assert [what.partition(":")[0] for what in state.not_searched] == [
        "float is not cut",
        "int8_static is not cut",
    ]


def test_a_smallest_model_is_not_made_once_the_time_is_over(tmp_path: Path) -> None:
    state = state_of(tmp_path)  # which can evaluate nothing
    state.checked["float-whole"] = checked("float-whole", 3.0)
    space: Any = SimpleNamespace(grid={"0": (32, 16)}, whole={"0": 32})
    variants = search.BlockVariants(state, BlockVariant((), None, space))
    assert variants.are_feasible(time.monotonic())
    assert list(state.checked) == ["float-whole"]


@pytest.mark.parametrize(
    "error",
    [
        OutOfTime("there was no more time (scores of channels, step 1 of 6)"),
        StageFailed("torch.export cannot trace Net, so its channels cannot be followed"),
    ],
)
def test_layers_in_float_are_searched_where_channels_cannot_be_ranked(
    error: StageFailed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[object] = []

    def from_model(evaluator: object, model: object, removed: object, deadline: float) -> None:
        assert 4 < deadline - time.monotonic() < 5
        raise error

    state = state_of(tmp_path, model=None, context=SimpleNamespace(device="cpu"))
    # Slower than the limit at full width, which shows nothing about other widths.
    state.checked["float-whole"] = checked("float-whole", 3.0)
    monkeypatch.setattr(search.BlockVariant, "from_model", from_model)
    monkeypatch.setattr(state, "measure_kernels", lambda variant, _: searched.append(variant.space))
    monkeypatch.setattr(search, "_check_cut", lambda *_: searched.append("checked"))
    search._search_variants(state, time.monotonic() + 10)
    (space, last) = searched
    assert not space.grid and last == "checked" and not state.is_infeasible
    assert state.not_searched == [f"widths: {error}"]


def test_after_the_time_one_model_is_run_as_a_point_and_its_refusal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [checked(name, 1.0 + n / 10, drop=n) for n, name in enumerate("ab")]
    state = state_of(tmp_path, confirm=lambda model: model.model_copy(update={"confirmed_drop": 0}))
    state.checked = {model.name: model for model in models}
    monkeypatch.setattr(state, "check_whole", lambda deadline: None)
    runs: list[str] = []

    reason = "min_speedup: the speedup is not measurable on this machine now"

    def run_point(front: object, evaluator: object, model: Any) -> Refusal:
        runs.append(model.name)
        return Refusal(reason, may_pass=True)

    monkeypatch.setattr(search, "run_point", run_point)
    monkeypatch.setattr(search, "write_point", lambda *_: None)
    monkeypatch.setattr(search, "write_points", lambda front, *_: front)
    front = search.run_search(state, time.monotonic() - 60)
    assert runs == ["a"] and (front.refused, front.may_pass) == ({"a": reason}, ("a",))
    assert any("further models within all limits" in what for what in front.not_searched)
    message = nothing_found(front)
    assert "was found whose run passed; the nearest is float: 1 ms" in message
    assert message.endswith(reason)
    assert "no model that was checked meets all limits and passed its run" in lines_below(
        front, tmp_path
    )
    page = front_page(front)
    assert "Points whose run did not pass" in page and "meets all limits and passed its" in page


def test_a_point_whose_run_did_not_pass_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [checked(name, 1.0) for name in "abc"]
    before = {"refused": {"a": "busy"}, "may_pass": ["a"]}
    front = front_of(*models, limits={}, points=["a", "b", "c"], **before)
    runs: list[str] = []

    def run_point(front: object, evaluator: object, model: Any) -> Refusal:
        runs.append(model.name)
        return Refusal(f"gate of {model.name}", may_pass=model.name == "c")

    monkeypatch.setattr("compress.pipelines.auto.front.run_point", run_point)
    monkeypatch.setattr("compress.pipelines.auto.front.write_point", lambda *_: None)
    evaluator: Any = SimpleNamespace(out=tmp_path, settings=AutoSettings())
    found = write_points(front, evaluator, None, math.inf)
    assert found.refused == {"a": "busy", "b": "gate of b", "c": "gate of c"}
    assert found.may_pass == ("a", "c") and runs == ["b", "c"]


@pytest.mark.slow
def test_ranking_channels_and_making_models_of_other_widths_stop_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "net.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    pipeline = PipelineConfig.from_yaml(tmp_path / "net.yaml")
    assert pipeline.auto is not None
    steps: list[str] = []
    options = RunOptions(progress=lambda task, *_: steps.append(task))
    evaluator = CandidateEvaluator.from_pipeline(pipeline, pipeline.auto, tmp_path / "o", options)
    steps.clear()
    variant = BlockVariant.from_model(evaluator, evaluator.model)
    tasks = {"inputs of layers", "scores of channels", "verifying slices"}
    assert tasks <= {*steps} and variant.space.grid
    for task in sorted(tasks):
        # Each of them stops it: the others are before the deadline.
        def late(name: str, done: int, total: int, note: str = "", late_task: str = task) -> None:
            progress_until(OVER if name == late_task else math.inf, silent)(name, done, total, note)

        stopped = replace(evaluator, context=replace(evaluator.context, progress=late))
        with pytest.raises(OutOfTime, match=task):
            BlockVariant.from_model(stopped, evaluator.model)
    with pytest.raises(OutOfTime):
        BlockVariant.from_model(evaluator, evaluator.model, (), OVER)
    state = SearchState(evaluator)
    state.check(Candidate("float"))
    state.last_moment = OVER
    state.check(Candidate("int8_static"))
    assert "int8_static-whole" not in state.checked and not state.failed
    assert "int8_static-whole: " in state.not_searched[0]
    state.last_moment = math.inf
    state.check(Candidate("int8_static"))
    assert "int8_static-whole" in state.checked


def test_channels_are_scored_once_in_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same model by the same samples, however many candidates are cut."""
    remembered: list[object] = []

    def run_search(state: object, deadline: float) -> Any:
        remembered.append(remembered_scores._remembered)
        return front_of(limits={})

    evaluator = SimpleNamespace(settings=AutoSettings(), out=tmp_path)
    monkeypatch.setattr(search.CandidateEvaluator, "from_pipeline", lambda *_: evaluator)
    monkeypatch.setattr(search, "run_search", run_search)
    pipeline = PipelineConfig.model_validate(yaml.safe_load(FILE))
    search.search(pipeline, AutoSettings(), tmp_path, RunOptions())
    assert remembered == [{}] and remembered_scores._remembered is None


BUSY = NotMeasurable("the latency is not measurable on this machine now")


def test_models_that_a_busy_machine_cannot_measure_are_tried_again_later(tmp_path: Path) -> None:
    tried: list[str] = []
    refused = {"float-whole": 1, "int8_static-whole": 1, "int8_dynamic-whole": 9}

    def evaluate(candidate: Candidate, *_: object) -> CheckedModel:
        tried.append(candidate.format)
        if tried.count(candidate.format) <= refused[candidate.name]:
            raise BUSY
        return checked(candidate.name, 1.0, **candidate.settings())

    int8 = ["int8_dynamic", "int8_static"]
    settings = AutoSettings.model_validate({"space": {"formats": int8}})
    state = state_of(tmp_path, evaluate=evaluate, settings=settings)
    state.check_whole(math.inf)
    assert tried == ["float", "float", *int8] and {*state.checked} == {"float-whole"}
    state.check_postponed(OVER, is_last=True)
    assert len(tried) == 4 and [what[:24] for what in state.not_searched] == [
        "int8_dynamic-whole: this",
        "int8_static-whole: this ",
    ]
    state.check_postponed(math.inf)
    assert {*state.checked} == {"float-whole", "int8_static-whole"} and not state.failed
    state.check_postponed(math.inf, is_last=True)
    state.check_postponed(math.inf, is_last=True)
    assert tried == ["float", "float", *int8, *int8, "int8_dynamic"]
    assert state.failed == {Candidate("int8_dynamic"): str(BUSY)}


def test_layers_stay_in_float_though_a_busy_machine_cannot_measure_their_onnx_file(
    tmp_path: Path,
) -> None:
    def evaluate(candidate: Candidate, *_: object) -> CheckedModel:
        raise StageFailed("it cannot be quantized") if candidate.format == "weights_8" else BUSY

    def layer_sensitivity(whole: CheckedModel, deadline: float) -> str:
        return f"sensitivity of {whole.format}"

    state = state_of(tmp_path, evaluate=evaluate, layer_sensitivity=layer_sensitivity)
    served = checked("a", 1.0, format="int8_static", runtime="openvino")
    assert state._layer_sensitivity(served, math.inf) == "sensitivity of int8_static"
    assert [*state.postponed] == [Candidate("int8_static")] and not state.not_searched
    served = checked("b", 1.0, format="weights_8", runtime="openvino")
    assert state._layer_sensitivity(served, math.inf) is None
    assert "weights_8 is left in float: its ONNX file was not made" in state.not_searched[0]


def test_a_format_whose_kernels_a_busy_machine_cannot_measure_comes_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(root=tmp_path)
    formats = ["float", "int8_static", "int8_dynamic"]
    settings = AutoSettings.model_validate({"space": {"formats": formats, "float_layers": 0}})
    state = state_of(tmp_path, context=context, settings=settings, measure_latency_ms=None)
    for format in formats:
        state.checked[f"{format}-whole"] = checked(f"{format}-whole", 1.0, format=format)
    tried: list[str] = []

    def build(format: Any, *_: object, **__: object) -> list[FormatModel]:
        tried.append(format)
        if format == "int8_dynamic":
            raise StageFailed("exports at other widths have other operators")
        if format == "float" and tried.count(format) == 1:
            raise BUSY
        return [FormatModel(format, InteractionSum(2.0, {}), InteractionSum(1.0, {}))]

    monkeypatch.setattr(search_state, "build_format_models", build)
    space: Any = SimpleNamespace(grid={"0": (32, 16)})
    state.measure_kernels(BlockVariant((), None, space), time.monotonic() + 60)
    assert tried == [*formats, "float"]
    assert {format for format, *_ in state.models} == {"float", "int8_static"}
    assert state.not_searched == [
        "int8_dynamic is not cut: exports at other widths have other operators"
    ]


def test_formats_are_measured_until_a_busy_machine_lets_one_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = ["float", "int8_static"]
    settings = AutoSettings.model_validate({"space": {"formats": formats, "float_layers": 0}})
    members = {"context": Context(root=tmp_path), "settings": settings, "measure_latency_ms": None}
    tried: list[str] = []

    def build(format: Any, *_: object, **__: object) -> list[FormatModel]:
        tried.append(format)
        if len(tried) < enough:
            raise BUSY
        return [FormatModel(format, InteractionSum(2.0, {}), InteractionSum(1.0, {}))]

    monkeypatch.setattr(search_state, "build_format_models", build)
    space: Any = SimpleNamespace(grid={"0": (32, 16)})
    variant = BlockVariant((), None, space)

    def measured(seconds: float | None) -> SearchState:
        state = state_of(tmp_path, **members)
        for format in formats:
            state.checked[f"{format}-whole"] = checked(f"{format}-whole", 1.0, format=format)
        state.measure_kernels(variant, None if seconds is None else time.monotonic() + seconds)
        return state

    enough = 5
    state = measured(60)
    assert tried == [*formats, *formats, "float", "int8_static"] and len(state.models) == 2
    tried.clear()
    enough = 10**9
    state = measured(0.2)
    assert not state.models and len(tried) > 4
    assert sorted(state.not_searched) == [f"{format} is not cut: {BUSY}" for format in formats]
    tried.clear()
    state = measured(None)  # without an end of time, once more
    assert tried == [*formats, *formats]
