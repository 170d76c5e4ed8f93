"""How the built-in server fares under attack: how late its health is answered, and its memory.

    python benchmarks/server/attacks.py [--processes 2] [--seconds 10] [--only WORDS]

Each attack meets a fresh server, which serves a small model of the tests.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.serve.attacks import ATTACKS, under_attack
from tests.serve.served_here import sealed, serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    given = parser.parse_args()
    print(f"{'':38}{'health, worst s':>16}{'unanswered':>14}{'kept, worst s':>15}{'MiB':>13}")
    with tempfile.TemporaryDirectory() as folder:
        model = sealed(Path(folder) / "model").path
        for name in [name for name in ATTACKS if given.only in name]:
            with serving(model, "--processes", str(given.processes)) as server:
                process = psutil.Process(server.process.pid)
                pids = [p.pid for p in (process, *process.children(recursive=True))]
                port = int(server.url.rpartition(":")[2])
                seen = under_attack(name, port, pids, given.seconds)
            lost = [sum(value == float("inf") for value in v) for v in (seen.health, seen.kept)]
            unanswered = f"{lost[0]}/{lost[1]} of {len(seen.health)}"
            memory = f"{seen.mib_before:.0f} +{seen.grown_mib:.0f}"
            worst = [max([v for v in x if v < 1e9], default=-1) for x in (seen.health, seen.kept)]
            print(
                f"{name:38}{worst[0]:>16.2f}{unanswered:>14}{worst[1]:>15.2f}{memory:>13}",
                flush=True,
            )


if __name__ == "__main__":
    main()
