"""ResNet-20 on scikit-learn's digits: each criterion, and Torch-Pruning's, at an equal budget.

Each result is one line of JSON, printed and added to `--results`; what the file has is not measured
again. Accuracy is that on `test`, of the epoch (the cut itself among them) that is best on `val`;
`latency` is ONNX Runtime's at batch 32 over that of the whole network, measured in turn. Latency
depends on widths alone, so it is measured once for each, which `--what latency` does by itself on a
quiet machine. Torch-Pruning is compared where it can be imported.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from compress import Context, PruneChannels, Splits, Train
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.data.splits import DataReference
from compress.graph.flops import count_macs
from compress.profiling.benchmark import compare_latency

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
OURS = ("l2", "l1", "taylor", "hessian", "fpgm", "lamp", "bn_scale", "wanda", "obs", "random")
THEIRS = ("l2", "taylor", "hessian", "fpgm", "lamp", "bn_scale")
BATCH = 64
WHAT = ("accuracy", "latency")


def main() -> None:
    options = _parsed()
    torch.set_num_threads(1)
    sys.path.insert(0, str(DIGITS))
    known = _known(options.results)
    for seed in range(options.seeds) if "accuracy" in options.what else ():
        tasks = list(_tasks(options, seed, known))
        with tempfile.TemporaryDirectory() as folder:
            _score(Path(folder), tasks, seed, options, known)
    if "latency" in options.what:
        _time(options, known)
    _table(known)


def _score(folder: Path, tasks: list, seed: int, options: argparse.Namespace, known: dict) -> None:
    """Measure what each cut of one trained network answers, before and after fine-tuning."""
    if not tasks:
        return
    splits = DataReference("data:digits", {}, DIGITS, 128).load()
    source = _trained(folder, splits, seed, options.train_epochs)
    for key, cut in tasks:
        module = cut(source, splits, folder / "-".join(map(str, key)))
        if module is not None:
            line = _measured(module, source.load(), splits, options.epochs, seed)
            _record(options.results, known, key, line)


def _time(options: argparse.Namespace, known: dict) -> None:
    """Measure the latency of each width that a method cuts to."""
    with tempfile.TemporaryDirectory() as folder:
        splits = DataReference("data:digits", {}, DIGITS, 128).load()
        source = _resnet(Path(folder), 0)
        for key, cut in _tasks(options, 0, {}):
            width = ("latency", key[0], key[2], key[3])
            if key[1] == "l2" and "no refit" not in key[2] and width not in known:
                module = cut(source, splits, Path(folder) / "-".join(map(str, key)))
                if module is not None:
                    x = splits.datasets["test"].tensors[0]
                    ratio = _latency_ratio(source.load(), module, x)
                    _record(options.results, known, width, {"latency": ratio})


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser("pruning.py digits", description=__doc__)
    parser.add_argument("--small", action="store_true", help="one seed, one ratio, few epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.85])
    parser.add_argument("--importance", nargs="+", default=OURS, choices=OURS)
    parser.add_argument("--train-epochs", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=6, help="of fine-tuning")
    parser.add_argument("--results", type=Path, help="file of lines; measured ones are skipped")
    parser.add_argument("--what", nargs="+", default=WHAT, choices=WHAT)
    options = parser.parse_args()
    if options.small:
        options.seeds, options.ratios, options.epochs = 1, [0.5], 1
        options.train_epochs = 6
        options.importance = [name for name in options.importance if name in ("l2", "obs")]
    return options


def _known(results: Path | None) -> dict[tuple[object, ...], dict[str, float]]:
    lines = results.read_text().splitlines() if results and results.exists() else []
    return {tuple(found.pop("key")): found for found in map(json.loads, lines)}


def _tasks(
    options: argparse.Namespace, seed: int, known: dict
) -> Iterator[tuple[tuple[object, ...], Callable]]:
    for ratio in options.ratios:
        for importance in options.importance:
            yield from _unknown(known, "compress", importance, 1, ratio, seed)
        yield from _unknown(known, "compress", "l2", 16, ratio, seed)
        yield from _unknown(known, "compress", "l2", 1, ratio, seed, refit=False)
        for importance in THEIRS if not options.small else THEIRS[:1]:
            yield from _unknown(known, "torch-pruning", importance, 1, ratio, seed)


def _unknown(
    known: dict, who: str, importance: str, rounding: int, ratio: float, seed: int, **refit: bool
) -> Iterator[tuple[tuple[object, ...], Callable]]:
    how = f"round_to {rounding}" + (", no refit" if refit else "")
    key = (who, importance, how, ratio, seed)
    if key in known:
        return
    if who == "compress":
        yield key, _ours(ratio, importance, rounding, seed, **{"refit": True, **refit})
    else:
        yield key, _theirs(ratio, importance, rounding)


def _trained(folder: Path, splits: Splits, seed: int, epochs: int) -> EagerModel:
    context = Context(root=folder / "trained", data=splits, seed=seed)
    return Train(epochs=epochs, batch_size=BATCH)(_resnet(folder, seed), context)


def _resnet(folder: Path, seed: int) -> EagerModel:
    torch.manual_seed(seed)
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
    recipe = Recipe(factory="models:resnet20")
    return import_checkpoint(folder / "source", recipe, signature, checkpoint=None, folder=DIGITS)


def _ours(ratio: float, importance: str, rounding: int, seed: int, *, refit: bool) -> Callable:
    def cut(source: EagerModel, splits: Splits, root: Path) -> nn.Module:
        samples = {} if refit else {"calibration_samples": 0}
        stage = PruneChannels(
            ratio=ratio, importance=importance, round_to=rounding, refit=refit, **samples
        )
        return stage(source, Context(root=root, data=splits, seed=seed)).load()

    return cut


def _theirs(ratio: float, importance: str, rounding: int) -> Callable:
    def cut(source: EagerModel, splits: Splits, _: Path) -> nn.Module | None:
        try:
            import torch_pruning
        except ImportError:
            return None
        module = source.load()
        pruner = torch_pruning.importance
        judge = {
            "l2": lambda: pruner.GroupMagnitudeImportance(p=2),
            "taylor": pruner.GroupTaylorImportance,
            "hessian": pruner.GroupHessianImportance,
            "fpgm": pruner.FPGMImportance,
            "lamp": pruner.LAMPImportance,
            "bn_scale": pruner.BNScaleImportance,
        }[importance]()
        batch = next(splits.calibration(512, seed=0))
        made = torch_pruning.pruner.MetaPruner(
            module,
            batch.inputs[0][:2],
            importance=judge,
            pruning_ratio=ratio,
            round_to=rounding,
            ignored_layers=[module.head],
        )
        if importance == "taylor":
            F.cross_entropy(module(*batch.inputs), batch.target).backward()
        elif importance == "hessian":
            _accumulate_(module, judge, batch)
        made.step()
        return module.eval()

    return cut


def _accumulate_(module: nn.Module, judge, batch) -> None:
    """Feed Torch-Pruning's second-order criterion with gradients sample by sample, as it asks."""
    losses = F.cross_entropy(module(*batch.inputs), batch.target, reduction="none")
    for loss in losses[:64]:
        module.zero_grad()
        loss.backward(retain_graph=True)
        judge.accumulate_grad(module)


def _measured(module, original, splits, epochs: int, seed: int) -> dict:
    x = splits.datasets["test"].tensors[0]
    macs = count_macs(module, (x[:1],)) / count_macs(original, (x[:1],))
    cut = _accuracy(module, splits, "test")
    _finetune_(module, splits, epochs, seed)
    tuned = _accuracy(module, splits, "test")
    return {"macs": macs, "cut": cut, "tuned": tuned}


def _finetune_(module: nn.Module, splits: Splits, epochs: int, seed: int) -> None:
    """Train as every method is trained, and keep what is best on `val`, in place."""
    generator = torch.Generator().manual_seed(seed)
    x, y = splits.datasets["train"].tensors
    steps = len(x) // BATCH
    optimizer = torch.optim.SGD(module.parameters(), 0.02, 0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=epochs * steps)
    best = (_accuracy(module, splits, "val"), copy.deepcopy(module.state_dict()))
    for _ in range(epochs):
        module.train()
        for rows in torch.randperm(len(x), generator=generator)[: steps * BATCH].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(module(x[rows]), y[rows], label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
        now = _accuracy(module, splits, "val")
        if now > best[0]:
            best = (now, copy.deepcopy(module.state_dict()))
    module.load_state_dict(best[1])


@torch.no_grad()
def _accuracy(module: nn.Module, splits: Splits, split: str) -> float:
    x, y = splits.datasets[split].tensors
    return float((module.eval()(x).argmax(1) == y).float().mean())


def _latency_ratio(before: nn.Module, after: nn.Module, x: torch.Tensor) -> float:
    """Return the ratio of ONNX Runtime's latencies at batch 32, measured in turn."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, module in enumerate((before, after)):
            path = f"{folder}/{i}.onnx"
            torch.onnx.export(module.eval(), (x[:32],), path, dynamo=True, verbose=False)
            sessions.append(onnxruntime.InferenceSession(path, options))
    name = sessions[0].get_inputs()[0].name

    def opener(session):
        return partial(nullcontext, lambda batch: session.run(None, {name: batch.numpy()}))

    return compare_latency(*map(opener, sessions), [(x[:32],)], threads=1).share or math.nan


def _record(results: Path | None, known: dict, key: tuple, line: dict[str, float]) -> None:
    known[key] = line
    text = json.dumps({"key": key, **{name: round(v, 4) for name, v in line.items()}})
    print(text, flush=True)
    if results:
        with results.open("a") as file:
            file.write(text + "\n")


def _table(known: dict[tuple[object, ...], dict[str, float]]) -> None:
    """Print the mean over seeds of each method at each ratio, the best first."""
    rows: dict[tuple, list[dict[str, float]]] = {}
    for (*method, ratio, _), line in known.items():
        if method[0] != "latency" and "tuned" in line:
            rows.setdefault((ratio, *method), []).append(line)
    means = {
        key: {n: statistics.mean(line[n] for line in lines) for n in lines[0]}
        for key, lines in rows.items()
    }
    print(f"\n{'ratio':6}{'method':38}{'seeds':>6}{'MACs':>7}{'ORT':>6}{'cut':>7}{'tuned':>7}")
    for key in sorted(means, key=lambda k: (k[0], -means[k]["tuned"])):
        ratio, who, _, how = key
        widths = ("latency", who, how.removesuffix(", no refit"), ratio)
        timed = known.get(widths, {}).get("latency", float("nan"))
        mean = means[key]
        print(
            f"{ratio:<6}{' '.join(key[1:]):38}{len(rows[key]):6}{mean['macs']:7.3f}"
            f"{timed:6.2f}{100 * mean['cut']:7.1f}{100 * mean['tuned']:7.1f}"
        )
