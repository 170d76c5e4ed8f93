"""Write docs/assets/report.png: the head of a run's report, as Chromium draws it.

    make demo && .venv/bin/python docs/generator/picture.py runs/quickstart/report.html

Needs Chromium and Pillow. Refuses a report of a run that did not pass, or without a speed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).parents[1] / "assets" / "report.png"
LIMIT = 150_000
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1200,760",
)


def main(page: Path) -> None:
    """Take the picture, in as few colours as it needs."""
    report = json.loads(page.with_suffix(".json").read_text())
    if report["status"] != "passed":
        raise SystemExit(f"{page}: the run was {report['status']}, expected one that passed")
    if any("not measurable" in warning for warning in report["warnings"]):
        raise SystemExit(f"{page}: a speed was not measurable; run again on a quiet machine")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        browser = [chromium, *OPTIONS, f"--user-data-dir={folder}/profile", f"--screenshot={shot}"]
        address = page.resolve().as_uri()
        subprocess.run([*browser, address], check=True, capture_output=True, timeout=120)
        with Image.open(shot) as image:
            image.convert("RGB").quantize(64).save(PICTURE, optimize=True)
    if (size := PICTURE.stat().st_size) > LIMIT:
        raise SystemExit(f"{PICTURE}: {size:,} bytes, expected at most {LIMIT:,}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
