"""Prints how many mutants of each module the tests killed in the last `mutmut run`.

A mutant that lives and is listed in `equivalent.toml` computes the same. The others are printed as
they would be listed there. Exits with 1 where fewer than 90 % of the rest were killed.
"""

import fnmatch
import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.utils.format_utils import orig_function_and_class_names_from_key as names_of_key

HERE = Path(__file__).parent
MUTANTS = Path("mutants")
GOAL = 0.9
KINDS = ("killed", "equivalent", "survived")
KILLED = {1, 3, 36, 24, -24, 152, 255}
"""Exit codes of pytest and of mutmut's time limit: a test failed, or ran many times as long."""


def function_of(key: str) -> str:
    """Return the dotted name of the function that a mutant was made of."""
    function, owner = names_of_key(key)
    module = key.rpartition(".")[0]
    return ".".join(filter(None, (module, owner, function)))


def change_of(key: str, source: str) -> str:
    """Return the changed lines of a mutant as `before => after`."""
    lines = get_diff_for_mutant(key, path=source).splitlines()[2:]
    sides = (" ".join(x[1:].strip() for x in lines if x.startswith(sign)) for sign in "-+")
    return " => ".join(sides)


def is_equivalent(function: str, change: str, listed: list[dict[str, str]]) -> bool:
    """Return whether a mutant is listed by its whole change, or by a pattern of it."""
    for entry in listed:
        if fnmatch.fnmatchcase(function, entry["function"]) and (
            entry.get("change") == change
            or ("pattern" in entry and re.search(entry["pattern"], change))
        ):
            entry["used"] = "yes"
            return True
    return False


def main() -> int:
    """Print the table, what lives, and what is listed in vain."""
    listed = tomllib.loads((HERE / "equivalent.toml").read_text())["mutant"]
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    total: Counter[str] = Counter()
    for source in settings["only_mutate"]:
        meta = MUTANTS / f"{source}.meta"
        counts: Counter[str] = Counter()
        alive = []
        for key, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            if code is None or code in KILLED:
                counts["killed" if code else "not run"] += 1
                continue
            function, change = function_of(key), change_of(key, source)
            kind = "equivalent" if is_equivalent(function, change, listed) else "survived"
            counts[kind] += 1
            if kind == "survived":
                alive.append(f"  {function.removeprefix(source[:-3].replace('/', '.'))}: {change}")
        if counts:
            print(f"{source}: {counts.total()} mutants, " + described(counts))
            print(*alive, sep="\n", end="\n" if alive else "")
        total += counts
    print(f"all: {total.total()} mutants, {described(total)}")
    for entry in listed:
        if "used" not in entry:
            print(f"listed, and no mutant that lives: {entry}")
    return 0 if share(total) >= GOAL else 1


def described(counts: Counter[str]) -> str:
    """Return a row's numbers in words."""
    kinds = KINDS if counts["not run"] == 0 else (*KINDS, "not run")
    parts = (f"{counts[kind]} {kind}" for kind in kinds)
    return f"{', '.join(parts)}: {100 * share(counts):.1f} %"


def share(counts: Counter[str]) -> float:
    """Return the share of killed ones among those that are not equivalent."""
    return counts["killed"] / max(counts["killed"] + counts["survived"], 1)


if __name__ == "__main__":
    sys.exit(main())
