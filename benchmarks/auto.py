"""The solver of `compress auto` beside the true optimum and Optuna's TPE, on a space made once.

    python benchmarks/auto.py build    # makes every model of the space: 20 minutes
    python benchmarks/auto.py          # takes pip install optuna (5.0) for the opponent

The space is a chain of five convolutions on digits, each of four widths: 1,024 models, each cut
once, refitted on 128 samples and not trained. `benchmarks/auto_space.json` has the loss and the
latency of each. Regret is the cross-entropy of the best model found within a share of the whole
model's latency, beyond that of the best one there is; a check reveals one model's true figures.
"""

import copy
import json
import os
import random
import statistics
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
HERE = Path(__file__).parent
sys.path[:1] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from quantizer.sources import HERE as NETS  # noqa: E402

from compress import Context, Signature, TensorSpec, Train  # noqa: E402
from compress.artifacts.importing import import_checkpoint  # noqa: E402
from compress.artifacts.recipe import Recipe  # noqa: E402
from compress.common.forward import run_in_eval  # noqa: E402
from compress.core.progress import silent  # noqa: E402
from compress.data.splits import DataReference  # noqa: E402
from compress.profiling.benchmark import compare_latencies, compare_latency  # noqa: E402
from compress.profiling.interaction_sum import InteractionSum  # noqa: E402
from compress.pruning.allocation.solver import Limit, Programme  # noqa: E402
from compress.pruning.depth.output_error import OutputErrorMeter  # noqa: E402
from compress.pruning.recovery.recovery import recover_  # noqa: E402
from compress.pruning.verification.masked_equivalence import sliced_copy  # noqa: E402
from compress.pruning.width_harms import WidthSpace, measure_harms  # noqa: E402
from export.latency.kernel_table import KernelTable  # noqa: E402
from export.onnx.proto_io import write  # noqa: E402
from export.onnx.session import session_predictor  # noqa: E402
from export.onnx.translate import translate  # noqa: E402
from pipelines.auto.cost_models import latency_models  # noqa: E402
from pipelines.auto.cost_models.latency_models import FormatModel, build_format_models  # noqa: E402
from pipelines.config.auto_settings import AutoSettings  # noqa: E402
from pipelines.system.machine_info import machine  # noqa: E402

FILE = HERE / "auto_space.json"
BUDGETS = (0.75, 0.6, 0.5, 0.4, 0.3)
"""Shares of the whole model's latency."""
CHECKS, TRIALS = (1, 2, 3, 5, 10), (25, 50)
SEEDS = range(5)
"""Of TPE, whose median regret is shown."""
AT_ONCE = 16
"""Models that are measured in turn."""


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["build"]:
        build()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        compare()


def build() -> None:
    """Make and measure every model of the space, and what the solver is given."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = DataReference("nets:easy", {}, NETS, 128).load()
        context = Context(root=folder / "x", data=data)
        signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
        torch.manual_seed(0)
        recipe = Recipe(factory="shapes:chain")
        source = import_checkpoint(folder / "s", recipe, signature, checkpoint=None, folder=HERE)
        model = Train(epochs=12, batch_size=64)(source, context.with_root(folder / "trained"))
        space = WidthSpace.of_model(model, context, values=4)
        meter = OutputErrorMeter(model.load(), signature, context, "outputs")
        harms = measure_harms(
            space, silent, lambda m: meter.measure(m).distance ** 2, {}, lambda: None, 1e12
        )
        table = KernelTable(folder, machine(), 1)
        settings = AutoSettings()
        whole_file = folder / "whole.onnx"
        write(translate(model, None, "auto")[0], whole_file)
        whole, batches = session_predictor(whole_file, 1), context.measured_batches(signature, 1)

        def measure_ms(predict) -> float:
            return compare_latency(whole, predict, batches).after.p50

        (built,) = build_format_models(
            "float", ["onnx"], space.grid, model, context, settings, table, measure_ms
        )
        choices = [*product(*space.grid.values())]
        losses = [_loss(space, context, choice) for choice in choices]
        latencies = _latencies(model, context, settings, [*space.grid], choices, folder)
    content = {
        "machine": machine(),
        "grid": space.grid,
        "harms": [[group, width, h] for group, own in harms.items() for width, h in own.items()],
        "predicted_ms": [
            built.latency_ms(dict(zip(space.grid, choice, strict=True))) for choice in choices
        ],
        "latency_ms": latencies,
        "loss": losses,
        "terms": [
            [scope, widths, change]
            for scope, own in built.latency_ms.terms.items()
            for widths, change in own.items()
        ],
        "base_ms": built.latency_ms.base,
    }
    FILE.write_text(json.dumps(_rounded(content)) + "\n")


def _loss(space: WidthSpace, context: Context, widths: tuple[int, ...]) -> float:
    """Cut the model to some widths, refit it, and return its cross-entropy on `val`."""
    ranking = space.ranking
    chosen = dict(zip(space.grid, widths, strict=True))
    keep = [chosen.get(one.group.name, len(one.scores)) for one in ranking.ranked]
    plan = ranking.verify(keep)
    module = copy.deepcopy(sliced_copy(ranking.module, plan.kept, plan.attributes))
    if plan.groups:
        recover_(module, copy.deepcopy(ranking.module), plan.kept, space.batches)
    images, labels = context.data.datasets["val"].tensors
    return float(F.cross_entropy(run_in_eval(module, (images,))[0], labels))


def _latencies(model, context, settings, groups, choices, folder: Path) -> list[float]:
    """Measure the ONNX file of every choice, some in turn with the whole model's."""
    whole, exports = latency_models.export_at_random_widths(
        "float", model, context, settings, folder
    )
    resizable = latency_models.ResizableModel.fit(exports)
    batches = context.measured_batches(model.signature, 1)
    found: list[float] = []
    for start in range(0, len(choices), AT_ONCE):
        predictors = []
        for choice in (choices[0], *choices[start : start + AT_ONCE]):
            file = folder / "choice.onnx"
            write(resizable.resize(whole | dict(zip(groups, choice, strict=True))), file)
            predictors.append(session_predictor(file, 1))
        first, *others = compare_latencies(predictors, batches, seconds=0.2).latencies
        # As shares of the first model's time, since the machine's speed drifts meanwhile.
        base = found[0] if found else first.p50
        found += [base * other.p50 / first.p50 for other in others]
    return found


def compare() -> None:
    """Print errors of the latency model, and regrets of the solver and of TPE."""
    content = json.loads(FILE.read_text())
    grid = {group: tuple(widths) for group, widths in content["grid"].items()}
    choices = [*product(*grid.values())]
    truth = dict(
        zip(choices, zip(content["latency_ms"], content["loss"], strict=True), strict=True)
    )
    # As the search does after its first five checks: one factor for all, from five models.
    pairs = [*zip(content["predicted_ms"], content["latency_ms"], strict=True)]
    known = [pairs[0], *random.Random(0).sample(pairs, 4)]
    factor = statistics.median(measured / predicted for predicted, measured in known)
    errors = [abs(factor * predicted / measured - 1) for predicted, measured in pairs]
    close = sum(error <= 0.1 for error in errors) / len(errors)
    print(
        f"latency of {len(errors)} models, corrected by 5 of them: mean error "
        f"{100 * statistics.fmean(errors):.1f} %, {100 * close:.1f} % within 10 %"
    )
    whole_ms = truth[choices[0]][0]
    solver = {share: _solver_regrets(content, grid, truth, share * whole_ms) for share in BUDGETS}
    opponent = {share: _tpe_regrets(grid, truth, share * whole_ms) for share in BUDGETS}
    head = [f"{n} checks" for n in CHECKS] + [f"TPE, {n} trials" for n in TRIALS]
    print(f"\n| budget | {' | '.join(head)} |\n{'|---' * (len(head) + 1)}|")
    for share in BUDGETS:
        cells = [*map(_shown, solver[share]), *map(_shown, opponent[share])]
        print(f"| {share} | {' | '.join(cells)} |")


def _solver_regrets(content, grid, truth, limit_ms: float) -> list[float | None]:
    """Check what the solver proposes, correct the latency model, and solve again."""
    harm = {group: dict.fromkeys(widths, 0.0) for group, widths in grid.items()}
    for group, width, value in content["harms"]:
        harm[group][width] = value
    terms: dict[tuple[str, ...], dict[tuple[int, ...], float]] = {}
    for scope, widths, change in content["terms"]:
        terms.setdefault(tuple(scope), {})[tuple(widths)] = change
    model = FormatModel("float", InteractionSum(content["base_ms"], terms), None)
    programme = Programme(grid, harm)
    whole = {group: widths[0] for group, widths in grid.items()}
    model.correct(model.latency_ms(whole), truth[tuple(whole.values())][0])
    checked: list[dict[str, int]] = []
    best: float | None = None
    regrets: list[float | None] = []
    optimum = _optimum(truth, limit_ms)
    for number in range(1, max(CHECKS) + 1):
        widths = programme.solve([Limit(model.corrected(), 0.99 * limit_ms)], checked)
        if widths is not None:
            checked.append(widths)
            latency_ms, loss = truth[tuple(widths[group] for group in grid)]
            model.correct(model.latency_ms(widths), latency_ms)
            if latency_ms <= limit_ms:
                best = loss if best is None else min(best, loss)
        if number in CHECKS:
            regrets.append(None if best is None else best - optimum)
    return regrets


def _tpe_regrets(grid, truth, limit_ms: float) -> list[float | None]:
    """Return the median regret of Optuna's TPE, which gets by how much the limit is missed."""
    try:
        import optuna
    except ImportError:
        return [None] * len(TRIALS)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optimum = _optimum(truth, limit_ms)
    found: list[list[float]] = [[] for _ in TRIALS]
    for seed in SEEDS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Optuna 5 renames constraints_func
            sampler = optuna.samplers.TPESampler(
                seed=seed, constraints_func=lambda trial: (trial.user_attrs["over"],)
            )
        study = optuna.create_study(sampler=sampler)
        best = float("inf")
        for number in range(1, max(TRIALS) + 1):
            trial = study.ask()
            widths = tuple(trial.suggest_categorical(g, list(w)) for g, w in grid.items())
            latency_ms, loss = truth[widths]
            trial.set_user_attr("over", latency_ms / limit_ms - 1)
            study.tell(trial, loss)
            best = min(best, loss) if latency_ms <= limit_ms else best
            if number in TRIALS:
                found[TRIALS.index(number)].append(best - optimum)
    return [statistics.median(own) for own in found]


def _optimum(truth, limit_ms: float) -> float:
    return min(loss for latency_ms, loss in truth.values() if latency_ms <= limit_ms)


def _shown(regret: float | None) -> str:
    return "–" if regret is None else f"{regret:.4f}"


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
