"""The page in a real browser, without a screen: on a phone, on a desktop, and on paper."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from compress.common.errors import CompressError
from compress.pruning.sensitivity_analysis import FamilySensitivity, Point, Sensitivity
from pipelines.commands.analysis.sensitivity import write_page
from pipelines.reporting.html import render
from pipelines.reporting.stage_rows import build_rows
from pipelines.reporting.verification_page import render_proof
from pipelines.results.schema import Report
from serve.verify import Proof, Replay

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH: apt install chromium"),
]
PAPER = 695
"""Pixels between the margins of a sheet of A4."""
PROBE = """<script>
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll(".scroll")].map(
    box => box.scrollWidth - box.clientWidth)
  const shown = [...document.querySelectorAll("main, main *")].filter(
    each => each.getClientRects().length && (each.localName == "svg" || !each.closest("svg")))
  const scrolls = each => ["auto", "scroll"].includes(getComputedStyle(each).overflowX)
  const words = each => `${each.localName}.${each.className}: ${each.textContent.slice(0, 60)}`
  const wide = shown.filter(each => {
    const inner = each.getBoundingClientRect(), parent = each.parentElement
    const outer = parent.getBoundingClientRect()
    return !scrolls(parent) && (inner.right > outer.right + 1 || inner.left < outer.left - 1)
      || !scrolls(each) && each.clientWidth && each.scrollWidth > each.clientWidth + 1
  }).map(words)
  const unreached = [...document.querySelectorAll("table")].filter(table => {
    const box = table.parentElement, last = table.rows[0].cells[table.rows[0].cells.length - 1]
    box.scrollLeft = box.scrollWidth
    const first = table.querySelector("tbody th").getBoundingClientRect()
    const cell = last.getBoundingClientRect(), seen = box.getBoundingClientRect()
    box.scrollLeft = 0
    return cell.width && (cell.right > seen.right + 1 || cell.left < first.right - 1)
  }).map(words)
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
  const brush = canvas.getContext("2d", {willReadFrequently: true})
  const page = document.body.appendChild(document.createElement("i"))
  page.style.background = "Canvas"
  const light = colours => {
    brush.globalAlpha = 1
    for (const [colour, alpha] of [[getComputedStyle(page).backgroundColor, 1], ...colours]) {
      brush.globalAlpha = alpha
      brush.fillStyle = colour
      brush.fillRect(0, 0, 1, 1)
    }
    const [r, g, b] = [...brush.getImageData(0, 0, 1, 1).data].map(
      v => v / 255 <= .04045 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4)
    return .2126 * r + .7152 * g + .0722 * b + .05
  }
  const pale = shown.filter(each => [...each.childNodes].some(
    child => child.nodeType == 3 && child.data.trim())).filter(each => {
    let [behind, alpha] = [[], 1]
    for (let at = each; at; at = at.parentElement) {
      behind.unshift([getComputedStyle(at).backgroundColor, 1])
      alpha *= getComputedStyle(at).opacity
    }
    const [low, high] = [light(behind), light([...behind, [getComputedStyle(each).color, alpha]])]
      .sort((a, b) => a - b)
    return high / low < 4.5
  }).map(words)
  const cut = [...document.querySelectorAll("svg text")].filter(text => {
    const inner = text.getBoundingClientRect(), outer = text.closest("svg").getBoundingClientRect()
    return inner.left < outer.left - 1 || inner.right > outer.right + 1
  }).map(text => text.textContent)
  parent.postMessage({
    name: NAME, wide, unreached, pale, dark: matchMedia("(prefers-color-scheme: dark)").matches,
    width: document.documentElement.scrollWidth, view: innerWidth, cut,
    hidden: Math.max(0, ...boxes), asked: performance.getEntriesByType("resource").map(e => e.name),
    letters: Math.min(...[...document.querySelectorAll("svg text")].map(
      text => text.getBoundingClientRect().height)),
  }, "*")
})
</script>"""
BRANCHES = """\
  - {name: int8, stage: quantize_static, input: prune_channels, calibration_samples: 60}
  - {name: torn, stage: prune_channels, input: train, ratio: 0.4,
     finetune: {epochs: 1, learning_rate: 1.0e+30}}
  - {name: never, stage: export_torchscript}
  - {name: large, stage: export_torchscript, input: prune_channels,
     gates: [{gate: max_size, ratio: 0.001, against: train}]}
"""
STATUSES = {"passed", "measured", "refused", "failed", "skipped"}
SCHEMES = '<meta name="color-scheme" content="light dark">'
COLLECT = """<script>
const found = []
addEventListener("message", message => {
  found.push(message.data)
  document.title = JSON.stringify(found)
})
</script>"""


def chromium(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Run the browser once; nothing but files can be reached."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={folder / 'profile'}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def pages(finished_run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return pages of a run that passed, one with every kind of end, many branches, a proof."""
    copied = Path(shutil.copytree(finished_run.folder, tmp_path_factory.mktemp("pages") / "user"))
    project = type(finished_run)(copied)
    found = {"passed": (project.out / "report.html").read_text()}
    project.file.write_text(project.file.read_text() + BRANCHES)
    with pytest.raises(CompressError):
        project.run()
    report = Report.read(project.out)
    assert {row.status for row in build_rows(report)} == STATUSES
    found["mixed"] = (project.out / "report.html").read_text()
    found["branches"] = render(_branches(Report.read(finished_run.out)), finished_run.out)
    replay = Replay(what="the recorded probe", samples=4, largest_difference=0.0)
    lines = {"proven": ("model.mar: sha256 " + "0" * 64,), "unproven": ("the validation split",)}
    proof = Proof(kind="torchserve", sha256="0" * 64, replays=(replay,), **lines)
    found["proof"] = render_proof(proof, "package_torchserve", ".html")
    write_page(project.out, "small", _sensitivity())
    found["sensitivity"] = (project.out / "sensitivity.html").read_text()
    return found


def _sensitivity() -> Sensitivity:
    points = tuple(
        Point(ratio=r, removed=int(16 * r), distance=r / 3, points=9 * r, macs=1 - r / 9, latency=1)
        for r in (0.25, 0.5, 0.75)
    )
    names = [f"encoder.blocks.{i}.feed_forward.projection" for i in range(8)]
    families = tuple(
        FamilySensitivity(name=name, modules=(name,), channels=16, points=points) for name in names
    )
    pinned = {f"{names[0]}.output_normalization": "its output is the model's"}
    about = {"judged_by": "metric", "metric": "accuracy", "value": 0.9}
    return Sensitivity(**about, samples=60, families=families, pinned=pinned)


def _branches(report: Report) -> Report:
    last = report.stages[-1]
    names = [f"export_onnx-ratio-0.{i:02d}-learning_rate-0.001" for i in range(30)]
    others = [last.model_copy(update={"name": name}) for name in names]
    return report.model_copy(update={"stages": (*report.stages, *others)})


@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.soak)])
def test_pages_fit_phones_desktops_and_paper(
    pages: dict[str, str], tmp_path: Path, scheme: str
) -> None:
    frames = []
    for name, page in pages.items():
        for width in (390, 768, 1280, PAPER):
            label = f"{name} {width}"
            shown = page if width != PAPER else _as_printed(page)
            probe = PROBE.replace("NAME", json.dumps(label))
            file = tmp_path / f"{label.replace(' ', '-')}.html"
            file.write_text(shown.replace("</body>", f"{probe}</body>"))
            frames.append(f'<iframe src="{file.name}" style="width:{width}px;border:0"></iframe>')
    (tmp_path / "all.html").write_text(f"<!doctype html>{SCHEMES}{COLLECT}<body>{''.join(frames)}")
    colours = f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"
    dumped = chromium(tmp_path, colours, "--dump-dom", (tmp_path / "all.html").as_uri()).stdout
    message = json.loads(html.unescape(re.search("<title>(.*?)</title>", dumped, re.S)[1]))
    assert len(message) == 4 * len(pages)
    for found in message:
        assert found["width"] <= found["view"] == int(found["name"].split()[1]), found
        assert found["wide"] == found["unreached"] == [], found
        assert found["dark"] == (scheme == "dark"), found
        assert found["pale"] == [], found
        assert found["asked"] == [], found
        assert found["cut"] == [], found
        assert found["letters"] is None or found["letters"] > 9, found  # None: no plots
        assert found["hidden"] <= 1 or found["view"] in (390, 768), found


def test_a_page_is_drawn_and_printed(pages: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(pages["passed"])
    page = (tmp_path / "report.html").as_uri()
    chromium(tmp_path, "--window-size=1280,3000", f"--screenshot={tmp_path / 'shot.png'}", page)
    chromium(tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}", page)
    assert (tmp_path / "shot.png").stat().st_size > 50_000, "an empty page is smaller"
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 12


def _as_printed(page: str) -> str:
    """Return a page as it is laid out on paper, on the screen."""
    assert "@media print {" in page
    return page.replace("@media print {", "@media all {")
