"""``requirements.lock``: what ``make lock`` writes fits the ranges of ``pyproject.toml``."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", LOCK, re.MULTILINE))


def _requirements(lines: list[str]) -> Iterator[Requirement]:
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                yield from _requirements(PROJECT["optional-dependencies"][extra])
        elif requirement.marker is None or requirement.marker.evaluate(
            {"platform_machine": "x86_64", "python_version": "3.11"}
        ):
            yield requirement


def test_the_lock_fits_the_ranges() -> None:
    wanted = [PROJECT["name"] + "[dev]", *PROJECT["dependencies"]]
    misfits = [
        f"{requirement}: {locked}"
        for requirement in _requirements(wanted)
        if requirement.name != "torch"
        and (locked := LOCKED.get(canonicalize_name(requirement.name), ""))
        not in requirement.specifier
    ]
    assert misfits == []


def test_every_locked_package_has_hashes_and_torch_is_left_out() -> None:
    assert len(LOCKED) > 100
    entries = re.split(r"^(?=\w)", LOCK, flags=re.MULTILINE)[1:]
    assert [entry[:40] for entry in entries if "--hash=sha256:" not in entry] == []
    # Builds of torch differ by index, and those for CUDA bring libraries of theirs.
    assert [n for n in LOCKED if n in ("torch", "triton") or n.startswith("nvidia-")] == []
