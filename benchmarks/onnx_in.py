"""ONNX files that others trained, read by us and by peers: one table for each, from one command.

    python benchmarks/onnx_in.py                     # all parts
    python benchmarks/onnx_in.py round-trip          # read and written again, without compression
    python benchmarks/onnx_in.py int8 --files magika # integers of some files
    python benchmarks/onnx_in.py prune               # a detector with channels removed
    python benchmarks/onnx_in.py --write             # into docs/benchmarks.md, too

The files come from the package registry (benchmarks/onnx_files/requirements.txt) into a folder of
the cache. Ours is `compress run` with `model: {file: …}`, in CPU seconds with all children. Peers
get the same file (in operator set 17 where it has one below 13), and the same samples. What is
scored (`test`) no calibration and no judging has seen. Times are CPU seconds of calls in one
process, all files in turn, on one thread.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
HERE = Path(__file__).parent
ROOT = HERE.parent
if str(HERE) not in sys.path:
    sys.path[:0] = [str(ROOT), str(HERE)]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import torch  # noqa: E402
from onnx_files.catalog import FILES, PRUNED, SILERO, OnnxFile, peers_file, prepare  # noqa: E402
from page import tables_of, write_part  # noqa: E402
from peer_tools.environments import PEERS, cost_of, tool_cost  # noqa: E402
from real import (  # noqa: E402
    FLOAT,
    Row,
    answers,
    calibration_file,
    file_bytes,
    kept_cost,
    machine,
    measure,
    row_of,
    run_peer,
)
from real_models.fetch import cache_folder, fetch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

PARTS = ("round-trip", "int8", "prune")
PAGE = ROOT / "docs" / "benchmarks.md"
TITLE = "ONNX files that others trained"
HEAD = """`python benchmarks/onnx_in.py --write` writes this part. The files are PaddleOCR's of
`rapidocr-onnxruntime`, Google's `magika` and `silero-vad`, as their packages have them: no training
code and no training data. Lines and pages of text are drawn with PIL, voices are synthesized by
espeak-ng, file types are those of this machine's files by their suffixes. Characters, orientations
and file types are compared with what is known; pixels of text and chunks of speech with what the
float file answers. All rows are run by the same ONNX Runtime on one thread, call by call in turn.
Size and time, which is the CPU time of a call (median of 20), are shares of the original file's.
Peers have an environment of their own and the recipe of their documentation. What no table has was
not measured; other load was on the machine.

"""
TOOLS = ("onnxruntime", "nncf", "olive")
EXPORT = "  - {name: onnx, stage: export_onnx}\n"
STATEFUL = {
    "half": "{name: input, shape: [batch, 576]}, {name: state, shape: [2, batch, 128]}",
    "openvino_16k": "",
}
"""Forms of silero-vad → their inputs, where the file's own axes allow too little."""
ROUND_TRIP_TITLE = "Read and written, without compression"
ROUND_TRIP = """Difference: the largest of an output, over its norm, on 3 inputs. The recognizer's
and the orientation file's sizes were declared as numbers, so that axes differ.
"""
CALLS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--files", nargs="*", default=list(FILES), choices=list(FILES))
    parser.add_argument("--peers", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "onnx-in")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, too")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    torch.set_num_threads(1)
    packages = fetch(given.cache, HERE / "onnx_files" / "requirements.txt")
    print(machine(), flush=True)
    for part in given.parts or PARTS:
        for name, text in MAKE[part](packages, given):
            heading, _, rest = text.partition("\n")
            text = f"{heading}\n\n{machine()}.\n{rest}"
            print(f"\n{text}", flush=True)
            (given.work / f"{name}.md").write_text(text)
    if given.write:
        write_part(TITLE, "\n\n".join([HEAD.strip(), *tables(given.work, PAGE)]), PAGE)


def tables(work: Path, page: Path) -> list[str]:
    """Return the tables that were made in a folder, and the others of a page as they are."""
    texts = tables_of(TITLE, page)
    for file in (work / f"{name}.md" for name in ("round-trip", *FILES, "prune")):
        if file.exists():
            text = file.read_text()
            texts[text.partition("\n")[0].removeprefix("## ")] = text
    titles = [ROUND_TRIP_TITLE, *(known.title for known in FILES.values()), PRUNED.title]
    return [texts[title] for title in titles if title in texts]


def round_trips(packages: Path, given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield a name and a table of the files as we and onnxsim read and write them."""
    lines = [
        f"## {ROUND_TRIP_TITLE}\n",
        ROUND_TRIP,
        "| | difference | names | axes | metadata | time, 1 at once | time, several at once "
        "| CPU s | onnxsim: difference | time, 1 at once |",
        "|" + "---|" * 10,
    ]
    sources = [(packages / FILES[n].file, FILES[n], FILES[n].input) for n in given.files]
    for name, inputs in STATEFUL.items():
        sources.append((packages / SILERO / f"silero_vad_{name}.onnx", None, inputs))
    for source, known, declared in sources:
        folder = given.work / "round-trip" / source.stem
        folder.mkdir(parents=True, exist_ok=True)
        pipeline, made = folder / "pipeline.yaml", folder / "run" / "artifacts/onnx/model.onnx"
        inputs = f", inputs: [{declared}]" if declared and not (known and known.fixed) else ""
        head = f"version: 1\nname: trip\nthreads: 1\nmodel: {{file: {source}{inputs}}}\n"
        pipeline.write_text(f"{head}stages:\n{EXPORT}")
        command = [sys.executable, "-m", "compress.cli", "run", pipeline, "--out", folder / "run"]
        cost = kept_cost(folder / "run", made, lambda c=command: cost_of(c, ROOT))
        simple = folder / "onnxsim.onnx"
        job = {"recipe": "simplify", "model": source, "samples": source, "output": simple}
        job |= {"transformer": False}
        run = partial(tool_cost, "onnxsim", given.environments, job)
        theirs = kept_cost(folder / "onnxsim", simple, run)
        cells = [source.stem]
        cells += _compared(source, made, cost, known)
        cells += _compared(source, simple, theirs, known, full=False)
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    yield "round-trip", "\n".join(lines)


def _compared(source, file, cost, known: OnnxFile | None, *, full: bool = True) -> list[str]:
    """Return the cells of a file that was read and written again."""
    blank = [""] * (6 if full else 1)
    if not file.exists():
        return [f"failed: {cost}".replace("|", "/"), *blank]
    sizes = (1, known.large_batch) if known else (1,)
    try:
        sessions = [_session(each) for each in (source, file)]
        worst = max(_difference(sessions, _feeds(source, known, 1, seed)) for seed in range(3))
        times = [f"{_time(sessions, _feeds(source, known, size, 0)):.2f}" for size in sizes]
    except Exception as error:  # noqa: BLE001 - of any runtime: it becomes the cell
        return [f"does not run: {error}".splitlines()[0][:100].replace("|", "/"), *blank]
    if not full:
        return [f"{worst:.0e}", times[0]]
    models = [onnx.load(each) for each in (source, file)]
    own = {entry.key for entry in models[0].metadata_props}  # to which ours adds others
    same = [_names, _axes, lambda m: {p.key: p.value for p in m.metadata_props if p.key in own}]
    kept = ["same" if read(models[0]) == read(models[1]) else "differ" for read in same]
    seconds = f"{cost.cpu_seconds:.0f}" if cost else ""
    return [f"{worst:.0e}", *kept, *times, *[""] * (2 - len(times)), seconds]


def _values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return [*(x for x in model.graph.input if x.name not in stored), *model.graph.output]


def _names(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in _values(model)]


def _axes(model: onnx.ModelProto) -> list[list[bool]]:
    """Return which axes are dynamic: exporters name them, and some names stand for nothing."""
    return [[d.dim_value > 0 for d in x.type.tensor_type.shape.dim] for x in _values(model)]


def _session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])


def _feeds(source: Path, known: OnnxFile | None, rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return seeded inputs for a file, of so many rows."""
    generator = np.random.default_rng(seed)
    declared = {s["name"]: s["shape"][1:] for s in known.input_specs()} if known else {}
    feeds = {}
    for value in _values(onnx.load(source))[: len(_session(source).get_inputs())]:
        axes = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name in declared:
            axes = [rows, *declared[value.name]]
        elif value.name == "input":
            axes = [axes[0] or rows, axes[1] or 576]
        axes = [size if size > 0 else rows for size in axes]
        kind = value.type.tensor_type.elem_type
        floats = generator.normal(size=axes).astype(np.float32) * 0.5
        if value.name == "sr":
            feeds[value.name] = np.array(16_000)
        elif kind == onnx.TensorProto.FLOAT:
            feeds[value.name] = floats
        else:
            feeds[value.name] = generator.integers(0, 257, axes).astype(np.int32)
    return feeds


def _difference(sessions, feeds: dict[str, np.ndarray]) -> float:
    pairs = zip(*(session.run(None, feeds) for session in sessions), strict=True)
    norm = np.linalg.norm
    return max(float(norm(b - a) / max(norm(a), 1e-12)) for a, b in pairs)


def _time(sessions, feeds: dict[str, np.ndarray]) -> float:
    """Return the CPU time of the second session over the first's, called in turn."""
    seconds: list[list[float]] = [[], []]
    for _ in range(CALLS):
        for session, found in zip(sessions, seconds, strict=True):
            start = thread_time()
            session.run(None, feeds)
            found.append(thread_time() - start)
    return median(seconds[1][3:]) / median(seconds[0][3:])


def integers(packages: Path, given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield a name and a table for each file of our int8 files and the peers'."""
    for name in given.files:
        yield name, _comparison(FILES[name], packages, given.work / name, given)


def pruned(packages: Path, given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield a name and a table of the text detector with channels removed, which no peer does."""
    given.peers = []
    yield "prune", _comparison(PRUNED, packages, given.work / "prune", given)


def _comparison(known: OnnxFile, packages: Path, work: Path, given: argparse.Namespace) -> str:
    """Return a table of what our stages make of a file, and the peers."""
    source, head = prepare(known, packages, work)
    files, rows = {FLOAT: source}, [Row(FLOAT)]
    for number, (title, stages) in enumerate(known.ours.items()):
        row = f"**compress**, {title}"
        pipeline, out = work / f"ours-{number}.yaml", work / f"ours-{number}"
        settings = (stage.format(calibration=known.sizes[0]) for stage in stages)
        lines = "".join(f"  - {{{each}}}\n" for each in settings)
        pipeline.write_text(f"{head}stages:\n{lines}{EXPORT}")
        command = [sys.executable, "-m", "compress.cli", "run", pipeline, "--out", out]
        files[row] = out / "artifacts" / "onnx" / "model.onnx"
        cost = kept_cost(out, files[row], lambda c=command: cost_of(c, ROOT))
        rows.append(row_of(row, cost, is_ours=True))
    for tool in given.peers:
        row, file = PEERS[tool].release, work / f"{tool}.onnx"
        job = {"recipe": "static", "model": peers_file(source, work), "output": file}
        job |= {"samples": calibration_file(known, work), "transformer": False}
        run = partial(run_peer, tool, given.environments, job)
        files[row] = file
        rows.append(row_of(row, kept_cost(work / tool, file, run)))
    scored = _score(known, work, rows, files)
    measure(known, work, rows, files)
    return _table(known, rows, scored)


def _score(
    known: OnnxFile, work: Path, rows: list[Row], files: dict[str, Path]
) -> dict[str, tuple[float, float]]:
    """Return what each file scores on `test`, and the cosine of its answers; fill in sizes."""
    from real import mean_cosine

    from compress.export.onnx.session import session_predictor

    data, scored = load_file(work / "data.safetensors"), {}
    inputs, reference = [data["test.input.0"]], None
    for row in [row for row in rows if not row.failed]:
        try:
            found = answers(session_predictor(files[row.name], 1), inputs, known.rows_a_call)
        except Exception as error:  # noqa: BLE001 - of any runtime: it becomes the row's message
            row.failed = f"does not run: {error}".splitlines()[0][:100]
            continue
        reference = reference or found
        cosine = mean_cosine([found[0][:, None]], [reference[0][:, None]])
        scored[row.name] = known.score(found[0], data["test.target.0"]), cosine
        row.size = file_bytes(files[row.name]) / file_bytes(files[FLOAT])
    return scored


def _table(known: OnnxFile, rows: list[Row], scored: dict[str, tuple[float, float]]) -> str:
    """Return a table in Markdown."""
    large = f"time, {known.large_batch} at once"
    head = ["", known.score_title, "cosine", "size", "time, 1 at once", large, "CPU s"]
    lines = [f"## {known.title}", "", known.about.format(*known.sizes), ""]
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        if row.failed:
            cells = [row.name, f"failed: {' '.join(row.failed.replace('|', '/').split())}"]
            cells += [""] * (len(head) - 2)
        else:
            score, cosine = scored[row.name]
            seconds = f"{row.cpu_seconds:.0f}" if row.cpu_seconds else ""
            cells = [row.name, f"{100 * score:.2f} %", f"{cosine:.4f}", f"{row.size:.3f}"]
            cells += [f"{row.small:.2f}", f"{row.large:.2f}", seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


MAKE = {"round-trip": round_trips, "int8": integers, "prune": pruned}

if __name__ == "__main__":
    main()
