"""Convert a graph of `export_program` to LiteRT, and compare their answers, row by row.

    python convert.py runs/pipeline/artifacts/export_program/model.pt2 model.tflite [samples.npz]

It needs litert-torch in an environment of its own, and nothing of this toolkit. `samples.npz` has
an array for each input, in their order; without it, 64 rows of seeded random numbers are compared.
"""

import sys
from time import perf_counter

import numpy as np

PACKAGES = "pip install torch==2.13.0 litert-torch==0.10.0 ai-edge-litert==2.3.0"
ROWS = 64
"""Random rows that are compared."""
LARGEST_ERROR = 1e-3
"""Of the largest answer; a float32 model is off by about 1e-6 of it."""


def main(graph: str, file: str, samples: str = "") -> int:
    """Return the process's exit code: 0 where the answers are equal."""
    try:
        import litert_torch
        import torch
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        print(f"error: {error.name} is missing; in a new environment: {PACKAGES}", file=sys.stderr)
        return 4
    program = torch.export.load(graph)
    module = program.module()
    if samples:
        with np.load(samples) as arrays:
            columns = [torch.from_numpy(arrays[name]) for name in arrays.files]
    else:
        torch.manual_seed(0)
        names = program.graph_signature.user_inputs
        given = [node.meta["val"] for node in program.graph.nodes if node.name in names]
        columns = [torch.randn(ROWS, *map(int, x.shape[1:])).to(x.dtype) for x in given]

    begin = perf_counter()
    one_row = tuple(column[:1] for column in columns)
    litert_torch.convert(module, one_row).export(file)
    print(f"converted in {perf_counter() - begin:.1f} s")

    run = Interpreter(file, num_threads=1).get_signature_runner()
    error = largest = 0.0
    equal_labels, times = 0, []
    for i in range(len(columns[0])):
        row = [column[i : i + 1] for column in columns]
        with torch.no_grad():
            expected = [x.numpy() for x in torch.utils._pytree.tree_leaves(module(*row))]
        # LiteRT has its own names, and integers of 32 bits where PyTorch has 64.
        types = [detail["dtype"] for _, detail in sorted(run.get_input_details().items())]
        feeds = {f"args_{k}": x.numpy().astype(types[k]) for k, x in enumerate(row)}
        begin = perf_counter()
        answer = run(**feeds)
        times.append(1e3 * (perf_counter() - begin))
        found = [answer[f"output_{k}"] for k in range(len(expected))]
        for a, b in zip(expected, found, strict=True):
            error = max(error, float(np.abs(a - b).max()))
            largest = max(largest, float(np.abs(a).max()))
        equal_labels += int(expected[0].argmax()) == int(found[0].argmax())
    print(
        f"{len(columns[0])} rows: largest difference {error:.2g} (largest answer {largest:.3g}), "
        f"{equal_labels} equal labels, median {np.median(times):.3f} ms a row"
    )
    return 0 if error <= LARGEST_ERROR * largest else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
