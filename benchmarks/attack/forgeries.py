"""Edits of a run's folder that forge a figure or a file, without computing a digest anew.

Each function changes files in place. After it, whatever reads them refuses or measures again.
"""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

FIGURE = re.compile(rb"(?<=[-:\s\[,])\d+(?:\.\d+)?(?:e-?\d+)?(?=[,\s\]}])")
"""A number in JSON."""


def replace(file: Path, content: bytes) -> None:
    """Write a file that hard links share, or that is write-protected, as an editor would."""
    file.unlink()
    file.write_bytes(content)


def flip_a_byte(file: Path, seed: int = 0) -> None:
    """Change one byte of a file at random; an empty file stays as it is."""
    raw = bytearray(file.read_bytes())
    if raw:
        chance = random.Random(seed)
        raw[chance.randrange(len(raw))] ^= chance.randrange(1, 256)
        replace(file, bytes(raw))


def edit_a_figure(file: Path, seed: int = 0) -> bool:
    """Change the last digit of a number in a JSON file, which stays JSON; False without one."""
    raw = file.read_bytes()
    figures = list(FIGURE.finditer(raw))
    if not figures:
        return False
    place = random.Random(seed).choice(figures).end() - 1
    digit = b"%d" % ((raw[place] - ord("0") + 1) % 10)
    replace(file, raw[:place] + digit + raw[place + 1 :])
    json.loads(file.read_bytes())
    return True


def _edit(file: Path, change: Any) -> None:
    content = json.loads(file.read_bytes())
    change(content)
    replace(file, json.dumps(content, indent=1).encode())


def answers_that_pass_every_gate(run: Path) -> None:
    """Make every measured metric in the store 1."""
    for file in run.glob(".store/*/answers.json"):
        text = file.read_bytes()
        replace(file, re.sub(rb'("value": ?\[?\s*)0\.\d+', rb"\g<1>1.0", text))


def report_that_passed(run: Path) -> None:
    """Let the report of a run say that it passed."""
    _edit(run / "report.json", lambda report: report.update(status="passed", error=""))


def lock_of_another_artifact(run: Path) -> None:
    """Let `lock.json` name other digests, beside half of a report."""
    report = run / "report.json"
    replace(report, report.read_bytes()[: report.stat().st_size // 2])
    others = {path.name: "0" * 64 for path in run.glob("artifacts/*")}
    _edit(run / "lock.json", lambda lock: lock["artifacts"].update(others))


def lock_without_a_report(run: Path) -> None:
    """Leave `lock.json` alone to say what a run made."""
    (run / "report.json").unlink()


def class_names_exchanged(run: Path) -> None:
    """Give each class of each artifact the name of the next one."""
    for file in run.glob("artifacts/*/manifest.json"):

        def shift(manifest: dict[str, Any]) -> None:
            names = manifest["facts"].get("class_names") or ["a", "b"]
            manifest["facts"]["class_names"] = [*names[1:], names[0]]

        _edit(file, shift)


def weights_of_openvino_replaced(run: Path) -> None:
    """Set the weights beside each OpenVINO graph to zero, and leave the graph as it is."""
    for file in run.glob("artifacts/*/model.bin"):
        replace(file, bytes(file.stat().st_size))


def float_model_ten_times_as_fast(run: Path) -> None:
    """Let a search remember the float model as ten times as fast as it was measured."""

    def speed_up(front: dict[str, Any]) -> None:
        for model in front["checked"]:
            if model["name"] == "float-whole":
                model["latency_ms"] /= 10
                model["latency_upper_ms"] = model["latency_ms"]

    _edit(run / "front.json", speed_up)


def cuts_that_lose_nothing(run: Path) -> None:
    """Let a search remember that no cut of channels, layer or block loses anything."""
    for file in (*run.glob("harms*.json"), *run.glob("layers.json")):
        _edit(file, lambda state: state["content"].update(dict.fromkeys(state["content"], 0.0)))


def kernels_that_take_no_time(run: Path) -> None:
    """Let a search remember that kernels take a picosecond."""
    for file in run.glob(".store/latency/kernels-*.json"):

        def speed_up(table: dict[str, Any]) -> None:
            for kernel in table["content"]["kernels"].values():
                kernel["seconds"] = 1e-12

        _edit(file, speed_up)


def explanation_of_another_cause(run: Path) -> None:
    """Let `explain.json` name another culprit."""
    if (file := run / "explain.json").exists():
        _edit(file, lambda found: [each.update(culprit="train") for each in found["explanations"]])


def a_byte_of_every_file(run: Path) -> None:
    """Change one byte in each file of a run but its log."""
    for number, file in enumerate(sorted(p for p in run.rglob("*") if p.is_file())):
        if not file.name.startswith("log.jsonl"):
            flip_a_byte(file, number)
