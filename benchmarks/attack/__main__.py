"""What attackers tried on the toolkit, tried again: prints how much of it was survived.

    make attack
    python -m benchmarks.attack [SECTION...] [--only WORDS] [--most 40] [--json FILE]

The attacks are data: functions and tables in `cases_*.py`, `forgeries.py` and `requests.py`, with
fixed seeds. An attack on a file succeeds if planted code ran, a file outside was opened, the
network was asked, an internal error or a traceback was printed, control characters reached the
terminal, or the command took more than 30 s or 2 GiB. Exit code 1: an attack succeeded.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from benchmarks.attack.sections import SECTIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--most", type=int, help="so many of each section, always the same")
    parser.add_argument("--json", type=Path, help="write what failed, and how")
    given = parser.parse_args()
    results = []
    for name in given.sections or SECTIONS:
        began = time.monotonic()
        section = SECTIONS[name](given.only, given.most)
        results.append(section)
        print(f"{section.line()}  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print("| attack | tried | survived | at worst |\n|---|---|---|---|")
    for section in results:
        print(section.line())
    if given.json:
        found = {s.name: {"failures": s.failures, "details": s.details} for s in results}
        given.json.write_text(json.dumps(found, indent=1))
    sys.exit(any(section.failures for section in results))


if __name__ == "__main__":
    main()
