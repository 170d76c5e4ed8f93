"""Writes docs/coverage.md's part on pruning: what pruning at 0.5 makes of every model of the zoo.

    python benchmarks/coverage.py [NAME…]

With names of models these alone are tried, and the other rows stay as they are. Torch-Pruning is
tried beside it where it can be imported, which takes no more than

    pip install --no-deps --target SOMEWHERE torch-pruning
    PYTHONPATH=SOMEWHERE python benchmarks/coverage.py

Each model is pruned in a process of its own, which has a minute of the processor's time.
"""

import argparse
import copy
import importlib.util
import os
import platform
import sys
from collections import Counter
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import torch_pruning_as_is as peer  # noqa: E402
from benchmarks.apart import within  # noqa: E402
from benchmarks.page import PAGE, write_part  # noqa: E402
from compress.artifacts.edits.removal import keep_indices_  # noqa: E402
from compress.common.forward import run_in_eval  # noqa: E402
from compress.common.tensor_difference import (  # noqa: E402
    largest,
    largest_difference,
    largest_finite,
)
from compress.graph.flops import count_macs  # noqa: E402
from compress.pruning.verification.masked_equivalence import (  # noqa: E402
    VerificationInputs,
    zero_masked,
)
from compress.pruning.verification.module_rewrites import rewrite_  # noqa: E402
from tests.compress.pruning.planning import plan_slices  # noqa: E402
from tests.compress.pruning.zoo.architectures import TRANSFORMERS  # noqa: E402
from tests.compress.pruning.zoo.registry import HAND, Case  # noqa: E402

SECONDS = 60
"""What a model has of the processor's time."""
PROCESSES = int(os.environ.get("PROCESSES", "2"))
"""Models tried at once."""
OUTPUT = "it is an output of the model"
LAYERS = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
REASON = 90
"""Characters shown of what stays."""

TITLE = "What can be pruned"
HEAD = """Every model of the tests' zoo, pruned at `ratio: 0.5` without a word about it. This part
is written by `benchmarks/coverage.py`; {versions}.

- **MACs, parameters**: what is removed for good, for one sample.
- **Error**: the largest difference between the pruned model and the original whose removed channels
  are zero, relative to its largest output, in double precision, on inputs of another batch size
  than that of the proof. Some models compute parts in single precision whatever they are asked.
- **What stays**: why some layers keep their channels, the commonest reason first, with the number
  of layers; layers that make the model's outputs keep them always. Where a residual stream goes
  through a LayerNorm or an RMSNorm its width stays: statistics over fewer channels are others.
- **Torch-Pruning** {peer}: `MagnitudePruner` with `GroupMagnitudeImportance`, `pruning_ratio=0.5`,
  the layers that make the outputs in `ignored_layers` (the last layer where these are not known),
  and nothing else said, in a process of its own with {seconds} s of the processor's time. *Right*
  and *wrong output* compare it with its masked twin as ours is compared, at {tolerance:g}: the
  entries left are found by their values, which all differ, and normalisations that became narrower
  normalise the same channels in the twin. *Unjudged*: they could not be found. With annotations by
  hand it can do more than is shown here.

"""


def ours(case: Case) -> dict[str, object]:
    """Return what pruning makes of a model."""
    module, inputs = case.build(), case.signature.example()
    original = copy.deepcopy(module)
    rewrite_(module, VerificationInputs(inputs))
    cut = plan_slices(module, inputs, ratio=0.5)
    smaller = copy.deepcopy(module)
    keep_indices_(smaller, cut.kept, cut.attributes)
    others = case.signature.example(batch=3, seed=5)
    doubles = [x.double() if x.is_floating_point() else x for x in others]
    expected = run_in_eval(zero_masked(module.double(), cut.kept), doubles)
    found = run_in_eval(smaller.double(), doubles)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (original, smaller)]
    macs = [count_macs(part, x) for part, x in ((original, inputs), (smaller.float(), inputs))]
    reasons = Counter(reason for reason in cut.pinned.values() if reason != OUTPUT)
    return {
        "macs": 1 - macs[1] / macs[0],
        "parameters": 1 - sizes[1] / sizes[0],
        "error": largest(map(_difference, found, expected)),
        "stays": "; ".join(f"{reason} ({n})" for reason, n in reasons.most_common(2)),
        "heads": [name for name, reason in cut.pinned.items() if reason == OUTPUT],
    }


def theirs(case: Case, heads: list[str]) -> str:
    """Return what Torch-Pruning makes of a model."""
    module = case.build()
    layers = [name for name, part in module.named_modules() if isinstance(part, LAYERS)]
    ignored = [name for name in heads if name in layers] or layers[-1:]
    return peer.verdict(module, case.signature.example(), ignored)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return largest_difference(expected, found) / max(largest_finite(expected), 1e-12)


def row(case: Case, has_peer: bool) -> str:
    """Return a model's line of the table."""
    found = within(SECONDS, ours, case)
    heads: list[str] = []
    if isinstance(found, dict):
        heads = found["heads"]
        error = "–" if not found["macs"] else f"{found['error']:.0e}"
        cells = [f"-{found['macs']:.0%}", f"-{found['parameters']:.0%}", error]
        stays = found["stays"]
        cells.append(stays if len(stays) <= REASON else f"{stays[: REASON - 1]}…")
    else:
        cells = ["–", "–", "–", "hang" if found is None else str(found)]
    if has_peer:
        answer = within(SECONDS, theirs, case, heads)
        cells.append("hang" if answer is None else str(answer).split("\n")[0])
    line = f"| {case.name} | {' | '.join(cell.replace('|', '/') for cell in cells)} |"
    print(line, flush=True)
    return line


def table(title: str, cases: tuple[Case, ...], has_peer: bool, names: list[str]) -> str:
    """Return a section with a line for each model, and the count of what became of them.

    With ``names`` all other lines are those of the page.
    """
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n#")[0]
    known = {line.split("|")[1].strip(): line for line in section.splitlines() if "|" in line}

    def line(case: Case) -> str:
        return known[case.name] if names and case.name not in names else row(case, has_peer)

    columns = ["model", "MACs", "parameters", "error", "what stays"]
    columns += ["Torch-Pruning"] * has_peer
    with ThreadPool(PROCESSES) as pool:
        rows = pool.map(line, cases, chunksize=1)
    cut = sum(float(r.split("|")[2].strip(" -%–") or 0) >= 15 for r in rows)
    text = f"## {title}\n\nAt least 15 % fewer MACs: {cut} of {len(rows)}."
    if has_peer:
        kinds = Counter(_kind(r.split("|")[6]) for r in rows)
        text += f" Torch-Pruning: {', '.join(f'{kind} {n}' for kind, n in kinds.most_common())}."
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *rows]
    return text + "\n\n" + "\n".join(lines) + "\n"


def _kind(answer: str) -> str:
    words = answer.strip().replace("*", "").partition(" (")[0]
    return "raises" if words.startswith("raises") else words


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all by default")
    names = parser.parse_args().names
    has_peer = importlib.util.find_spec("torch_pruning") is not None
    if has_peer:
        import torch_pruning  # noqa: F401 - once, too
    else:
        print("torch-pruning is not installed: its column is left out")
    packages = ["torch", "transformers"] + ["torch-pruning"] * has_peer
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    head = HEAD.format(
        versions=f"Python {platform.python_version()}, {versions}",
        peer=version("torch-pruning") if has_peer else "(not installed when this was written)",
        seconds=SECONDS,
        tolerance=peer.RIGHT,
    )
    if names:  # most rows are of the versions that the page has
        head = PAGE.read_text().partition(f"# {TITLE}\n")[2].partition("\n## ")[0].strip() + "\n\n"
    torch.set_num_threads(1)
    ours(TRANSFORMERS[0])  # what this imports is imported once, before processes are forked
    sections = [
        table("Architectures of transformers", TRANSFORMERS, has_peer, names),
        table("Modules written by hand", HAND, has_peer, names),
    ]
    write_part(TITLE, head + "\n".join(sections))


if __name__ == "__main__":
    main()
