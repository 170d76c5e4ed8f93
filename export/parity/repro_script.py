"""Write a script that shows where an export and PyTorch differ, and imports only those two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.export.parity.bisect import retrace
from compress.export.parity.compare import largest_relative_error
from compress.graph.torch_export import save_program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compress.common.forward import Predictor
    from compress.export.common.runtime import Reproducer
    from compress.export.parity.bisect import LayerSearch

SOURCE = "source.pt2"
INPUTS = "inputs.npz"
SCRIPT = "reproduce.py"

TEMPLATE = '''"""{what}

`{source}` is a part of the model as a torch.export program, `{exported}` the same part exported.
Run with `python {script}`; it needs torch, numpy{needs} alone, and exits with 1 where the answers
differ by more than LIMIT of their norm.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor and its kin
{imports}
HERE = Path(__file__).parent
LIMIT = {limit!r}
DTYPES = {dtypes!r}


def answers_of_the_export(inputs):
{answers}

stored = np.load(HERE / "{inputs}", allow_pickle=False)
inputs = [torch.from_numpy(stored[name]).to(getattr(torch, DTYPES[name])) for name in DTYPES]
with torch.no_grad():
    expected = torch.export.load(HERE / "{source}").module(check_guards=False)(*inputs)
expected = expected if isinstance(expected, (tuple, list)) else [expected]
worst = 0.0
for i, (a, b) in enumerate(zip(expected, answers_of_the_export(inputs))):
    a, b = a.double(), b.double()
    print(f"output {{i}}: PyTorch {{tuple(a.shape)}}, exported {{tuple(b.shape)}}")
    if a.shape != b.shape:
        sys.exit(1)
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, b - a)
    norm = torch.linalg.vector_norm(torch.where(a.isfinite(), a, 0.0)).clamp_min(1e-9)
    relative = float(torch.linalg.vector_norm(error) / norm)
    largest = float(error.abs().max()) if error.numel() else 0.0
    print(f"  differ by {{relative:.3g}} of the norm, by at most {{largest:.3g}} in an element")
    worst = relative if not relative <= worst else worst
sys.exit(0 if worst <= LIMIT else 1)
'''


def write(
    folder: Path,
    search: LayerSearch,
    reproducer: Reproducer,
    copy_export: Callable[[Path], None],
    exported: Predictor,
    summary: str,
) -> float:
    """Write script, program, exported file and inputs; return the error that they show.

    Where the search found no layer, the whole exported model is shown: `copy_export` writes it, and
    `exported` is its predictor.

    Raises:
        StageFailed: the part cannot be exported on its own.
    """
    file = folder / reproducer.file
    if search.node is None:
        part, signature, inputs = search.module, search.signature, search.inputs
        copy_export(file)
        with torch.no_grad():
            outputs = flatten_outputs(part(*inputs))
        error = largest_relative_error(outputs, exported(*inputs))
    else:
        part, signature, inputs, error = search.export_smallest(search.node, file)
    if not file.exists():
        raise StageFailed("the part cannot be exported on its own")
    program = retrace(part, signature, signature.example())
    save_program(program, folder / SOURCE)
    arrays = {
        # numpy has no bfloat16; the script turns it back.
        spec.name: (x.float() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy()
        for spec, x in zip(signature.inputs, inputs, strict=True)
    }
    np.savez(folder / INPUTS, allow_pickle=False, **arrays)
    text = TEMPLATE.format(
        what=summary,
        source=SOURCE,
        exported=reproducer.file,
        script=SCRIPT,
        inputs=INPUTS,
        needs=f" and {reproducer.library}" if reproducer.library else "",
        imports=reproducer.imports,
        limit=search.limit,
        dtypes={spec.name: spec.dtype for spec in signature.inputs},
        answers="\n".join(f"    {line}" for line in (*reproducer.run_lines, "")),
    )
    (folder / SCRIPT).write_text(text, encoding="utf-8")
    return error
