"""Write docs/coverage.md's part on export: every model of the zoo in each format.

Each export is a process of its own. Results are stored in a folder, so that a run that was stopped
continues; `--again` deletes them. `--formats` names the columns that are tried, by default all
whose libraries are installed; the others stay on the page as they are. `--aot` names the models
that are compiled by AOTInductor too, all by default, which takes half a minute each and minutes on
a busy machine.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.apart import within  # noqa: E402
from benchmarks.page import PAGE, write_part  # noqa: E402
from compress.export.executorch.runtime import quiet_library  # noqa: E402
from tests.compress.pruning.zoo.registry import Case  # noqa: E402
from tests.export.zoo.export_cell import (  # noqa: E402
    FORMATS,
    LARGEST_SIZE,
    OPENING,
    export_cell,
    formats_here,
    import_case,
)
from tests.export.zoo.models import HAND, TRANSFORMERS, ZOO  # noqa: E402

SECONDS = 300
"""Time limit of one export."""
PROCESSES = int(os.environ.get("PROCESSES", "2"))
"""Exports that run at the same time."""
Rows = dict[tuple[str, str], dict]
LIBRARIES = ("torch", "onnx", "transformers", "openvino", "executorch")
TITLE = "What can be exported"
HEAD = """Models of the tests' zoo (small, without trained weights), each exported to every format
and compared with its source. This part is written by `benchmarks/export.py coverage`; {versions}.

- A number: the largest difference to the source, relative to its largest output, on inputs of
  another batch size (5) and seed than those that the stage itself compares (batches of 1, 3 and 8,
  and three sizes or more of every other named axis). The sealed artifact was opened again in a
  fresh process and gave the same answers to the last bit.
- **no**: there is no artifact; the reason is what the stage says. *Nothing*: not tried.
- **TorchScript**: by `method: trace`, and where that refuses by `method: script`.
- **ExecuTorch** plans memory for the largest sizes, so `model.axes` declares a `max` of {largest}
  for every named axis.
- Words are open (named) axes beside the batch, and frames, heights and widths where the zoo names
  them so.

"""


def main() -> None:
    parser = argparse.ArgumentParser("export.py coverage", description=__doc__)
    parser.add_argument("--small", action="store_true", help="three models, nothing written")
    parser.add_argument("--again", action="store_true", help="delete earlier results")
    parser.add_argument("--as-it-is", action="store_true", help="write the results so far")
    parser.add_argument("--formats", nargs="*", default=formats_here(), choices=FORMATS)
    parser.add_argument("--aot", nargs="*", default=[*ZOO], help="models that are compiled")
    parser.add_argument("--models", nargs="*", help="these alone; the page keeps other rows")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "export_coverage")
    options = parser.parse_args()
    if options.again or options.small:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    import_once()
    cases = [ZOO[name] for name in ("separable", "gate", "pooled")]
    cases = cases if options.small else [ZOO[name] for name in options.models or ZOO]
    slow = {"AOTInductor": options.aot}
    wanted = [
        (case, name)
        for name in options.formats
        for case in cases
        if name not in slow or case.name in slow[name]
    ]
    if not options.as_it_is:
        _fill(wanted, options.folder)
    rows = read_rows(options.folder, "format")
    if not options.small:
        _open_again(rows, options.folder)
        write_part(TITLE, _text(_rows_of_page() | rows))


def import_once() -> None:
    """Import what each export would, before processes are forked."""
    for name in (
        "onnxruntime",
        "torch._inductor.compile_fx",
        "torch.onnx._internal.exporter._core",
    ):
        import_module(name)
    if "ExecuTorch" in formats_here():
        with quiet_library():
            import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry = ONNXRegistry.from_torchlib()
    ONNXRegistry.from_torchlib = staticmethod(lambda *_, **__: registry)


def read_rows(folder: Path, column: str) -> Rows:
    """Return the stored results by model and column."""
    rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return {(row["model"], row[column]): row for row in rows}


def _fill(wanted: list[tuple[Case, str]], folder: Path) -> None:
    """Try the cells that are not in the folder yet."""
    known = read_rows(folder, "format")
    missing = [(*cell, folder) for cell in wanted if (cell[0].name, cell[1]) not in known]
    with ThreadPool(PROCESSES) as pool:
        for row in pool.imap_unordered(_cell, missing):
            result = row["refusal"] or f"{row['error']:.1e}"
            print(f"{row['model']:20}{row['format']:12}{row['seconds']:6} s  {result}", flush=True)


def _cell(cell: tuple[Case, str, Path]) -> dict:
    case, name, folder = cell
    began = time.monotonic()
    path = folder / f"{case.name}-{name}"
    result = within(SECONDS, _export, case, name, path)
    if not isinstance(result, dict):
        result = {"refusal": f"traceback: {result or 'no answer in time'}"}
    seconds = round(time.monotonic() - began, 1)
    row = {"model": case.name, "format": name, **result, "seconds": seconds}
    path.with_name(f"{path.name}.json").write_text(json.dumps(row))
    return row


def _open_again(cells: Rows, folder: Path) -> None:
    """Mark artifacts, in place, whose outputs are others in a fresh process."""
    rows = [row for row in cells.values() if not row["refusal"]]
    paths = [str(folder / f"{row['model']}-{row['format']}") for row in rows]
    code = OPENING.format(folder=str(ROOT), paths=paths)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    digests = done.stdout.splitlines()
    print(f"opened {len(digests)} of {len(rows)} artifacts in a fresh process")
    for i, row in enumerate(rows):
        if digests[i : i + 1] != [row["digest"]]:
            row["refusal"] = "it answers otherwise in a fresh process"


def _export(case: Case, name: str, path: Path) -> dict:
    with TemporaryDirectory(prefix="compress-zoo-") as folder:
        return vars(export_cell(import_case(case, Path(folder) / "source", name), name, path))


def _rows_of_page() -> Rows:
    """Return the results that the page has, without digests."""
    part, rows = PAGE.read_text().partition(f"# {TITLE}\n")[2], {}
    formats: list[str] = []
    for line in re.findall(r"^\| (\w+ \|.*) \|$", part, re.MULTILINE):
        model, *cells, reasons = (cell.strip() for cell in line.split("|"))
        if model == "model":
            formats = cells
            continue
        names = "|".join(map(re.escape, formats))
        pairs = re.findall(rf"(?:^|; )({names}): (.*?)(?=; (?:{names}): |$)", reasons)
        refusals = dict(pairs)
        for name, cell in zip(formats, cells, strict=True):
            if cell:
                error = 0.0 if name in refusals else float(cell)
                rows[model, name] = {"refusal": refusals.get(name, ""), "error": error}
    return rows


def _text(rows: Rows) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    text = HEAD.format(
        versions=f"Python {platform.python_version()}, {versions}",
        largest=LARGEST_SIZE["ExecuTorch"],
    )
    good = sum(not row["refusal"] for row in rows.values())
    text += f"{good} of {len(rows)} cells ({good / len(rows):.1%}): "
    return text + f"{counts(rows, FORMATS)}\n" + tables("exported", rows, FORMATS, _row)


def counts(rows: Rows, columns: Iterable[str]) -> str:
    """Return how many models each column has, of those that were tried."""
    found = []
    for name in columns:
        column = [row for (_, known), row in rows.items() if known == name]
        found.append(f"{name} {sum(not row['refusal'] for row in column)} of {len(column)}")
    return f"{', '.join(found)}."


def tables(done: str, rows: Rows, columns: Collection[str], row: Callable[[str, Rows], str]) -> str:
    """Return a table for each half of the zoo, whose rows `row` writes."""
    text = ""
    for title, cases in (
        ("Architectures of transformers", TRANSFORMERS),
        ("Modules written by hand", HAND),
    ):
        text += f"\n## {title}, {done}\n\n"
        text += f"| model | {' | '.join(columns)} | reason |\n|{' --- |' * (len(columns) + 2)}\n"
        text += "".join(row(case.name, rows) for case in cases)
    return text


def _row(model: str, rows: Rows) -> str:
    cells, reasons = [], []
    for name in FORMATS:
        row = rows.get((model, name))
        if row is None:
            cells.append("")
        elif row["refusal"]:
            cells.append("**no**")
            # Without files in a folder of the run.
            refusal = re.sub(r"; see \S+parity\.json|/\S+/model\.\w+: ", "", row["refusal"])
            reasons.append(f"{name}: {' '.join(refusal.split())}")
        else:
            cells.append(f"{row['error']:.0e}")
    reason = "; ".join(reasons).replace("|", "/")
    return f"| {model} | {' | '.join(cells)} | {reason} |\n"
