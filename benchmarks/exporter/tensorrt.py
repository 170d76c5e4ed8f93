"""Write docs/coverage.md's part on TensorRT for RTX: the zoo's models that build into an engine.

Each model is built in float32, float16 (`convert_precision`) and int8 (`quantize_static` with
`target: tensorrt`) for three compute capabilities, in a process of its own; no engine is run.
Results are stored in a folder, so that a run that was stopped continues; `--again` deletes them.
"""

import argparse
import json
import platform
import re
import shutil
import sys
import time
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.apart import within  # noqa: E402
from benchmarks.exporter.coverage import (  # noqa: E402
    PROCESSES,
    Rows,
    counts,
    import_once,
    read_rows,
    tables,
)
from benchmarks.page import write_part  # noqa: E402
from compress.common.errors import CompressError  # noqa: E402
from compress.common.signature import AxisBounds  # noqa: E402
from compress.core.context import Context  # noqa: E402
from compress.data.splits import Splits  # noqa: E402
from compress.export.tensorrt.runtime import PRODUCTS  # noqa: E402
from compress.export.tensorrt.stage import TENSORRT_RTX, ExportTensorRT  # noqa: E402
from compress.quantization.stages.half_precision import ConvertPrecision  # noqa: E402
from compress.quantization.stages.static import QuantizeStatic  # noqa: E402
from tests.compress.pruning.zoo.registry import Case  # noqa: E402
from tests.export.zoo.export_cell import import_case  # noqa: E402
from tests.export.zoo.models import ZOO  # noqa: E402

CAPABILITIES = ("sm86", "sm89", "sm120")
SECONDS = 120
"""Limit of one model's processor time."""
SAMPLES = 16
BOUNDS = AxisBounds(min=4, max=16)
"""Sizes of named axes beside the batch, declared as `model.axes`."""
FORMS = {
    "float32": None,
    "float16": ConvertPrecision(dtype="float16"),
    "int8": QuantizeStatic(target="tensorrt", calibration_samples=SAMPLES),
}
TITLE = "What TensorRT for RTX builds"
HEAD = """The same models as below, built for {capabilities} by `export_tensorrt` on a machine
without a GPU: **built, not run**. Written by `benchmarks/export.py tensorrt`; {versions}.

- A number: size of the engine; of int8 also how many of the convolutions and matrix products
  compute with integers, counted in the network that TensorRT's parser made.
- **no**: there is no engine; the reason is what the stage says, with the node that the parser
  refused. `quantize_static` and `convert_precision` refuse some models before that.
- Calibrated on {samples} seeded inputs; named axes beside the batch are declared {bounds}.

"""


def main() -> None:
    parser = argparse.ArgumentParser("export.py tensorrt", description=__doc__)
    parser.add_argument("--small", action="store_true", help="three models, nothing written")
    parser.add_argument("--again", action="store_true", help="delete earlier results")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "tensorrt_coverage")
    options = parser.parse_args()
    if TENSORRT_RTX.missing():
        sys.exit(TENSORRT_RTX.problem)
    if options.again or options.small:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    import_once()
    names = ("separable", "gate", "pooled") if options.small else [*ZOO]
    known = read_rows(options.folder, "form")
    wanted = [(n, form) for form in FORMS for n in names if (n, form) not in known]
    with ThreadPool(PROCESSES) as pool:
        cells = ((ZOO[name], form, options.folder) for name, form in wanted)
        for row in pool.imap_unordered(_cell, cells):
            result = row["refusal"] or f"{row['bytes']:9} bytes, {row['integers']} in integers"
            print(f"{row['model']:20}{row['form']:9}{row['seconds']:6} s  {result}", flush=True)
    rows = read_rows(options.folder, "form")
    print(f"Built: {counts(rows, FORMS)}")
    if not options.small:
        write_part(TITLE, _text(rows), before="What can be exported")


def _cell(cell: tuple[Case, str, Path]) -> dict:
    case, form, folder = cell
    began = time.monotonic()
    result = within(SECONDS, _build, case, form)
    if not isinstance(result, dict):
        result = {"refusal": f"traceback: {result or 'no answer in time'}"}
    row = {"model": case.name, "form": form, **result}
    row["seconds"] = round(time.monotonic() - began, 1)
    (folder / f"{case.name}-{form}.json").write_text(json.dumps(row))
    return row


def _build(case: Case, form: str) -> dict:
    with TemporaryDirectory(prefix="compress-zoo-") as folder:
        root = Path(folder)
        model = import_case(case, root / "source", bounds=BOUNDS)
        # A batch that is fixed is one sample.
        batch = SAMPLES if model.signature.batch_axis else None
        inputs = model.signature.example(batch=batch) if batch else model.signature.example()
        rows = [
            (tuple(x[i] for x in inputs) if len(inputs) > 1 else inputs[0][i], torch.tensor(0))
            for i in range(SAMPLES if batch else 1)
        ]
        data = Splits({"train": rows, "val": rows})
        context = Context(root=root / "form", data=data, is_quick=True)
        try:
            stage = FORMS[form]
            converted = stage.run_checked(model, context) if stage else model
            export = ExportTensorRT(compute_capabilities=CAPABILITIES)
            engine = export.run_checked(converted, Context(root=root / "engine"))
        except CompressError as error:
            return {"refusal": f"{type(error).__name__}: {error}"}
        facts = engine.manifest.facts
        return {
            "refusal": "",
            "bytes": engine.payload_bytes,
            "integers": facts["integer_layers"],
            "products": sum(facts["layers"].get(kind, 0) for kind in PRODUCTS),
        }


def _text(rows: Rows) -> str:
    libraries = ("torch", "onnx", "transformers")
    rtx = "tensorrt-rtx-cu13-bindings"
    versions = ", ".join(f"{name} {version(name)}" for name in (*libraries, rtx))
    text = HEAD.format(
        capabilities=", ".join(CAPABILITIES),
        versions=f"Python {platform.python_version()}, {versions}",
        samples=SAMPLES,
        bounds=BOUNDS,
    )
    return text + f"Built: {counts(rows, FORMS)}\n" + tables("built", rows, FORMS, _row)


def _row(model: str, rows: Rows) -> str:
    cells, reasons = [], {}
    for form in FORMS:
        row = rows[model, form]
        if row["refusal"]:
            cells.append("**no**")
            refusal = re.sub(r"^\w+: (?:export_tensorrt: )?", "", " ".join(row["refusal"].split()))
            reasons.setdefault(re.sub(r"/\S+/", "", refusal), []).append(form)
            continue
        share = f", {row['integers']} of {row['products']}" if form == "int8" else ""
        cells.append(f"{row['bytes'] / 2**20:.2f} MiB{share}")
    reason = "; ".join(f"{', '.join(forms)}: {why}" for why, forms in reasons.items())
    return f"| {model} | {' | '.join(cells)} | {reason.replace('|', '/')} |\n"
