"""What running a file in a browser takes: Chromium, and onnxruntime-web in a user's folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from compress.common.errors import Unavailable
from compress.common.requirements import Requirement

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NodePackage(Requirement):
    """A package of the npm registry, in the folder that an environment variable names."""

    variable: str
    """The environment variable."""

    def missing(self) -> bool:
        """Whether the variable names no folder of that package."""
        return self._package_file() is None

    def need_folder(self) -> Path:
        """Return the folder, or raise Unavailable."""
        if (file := self._package_file()) is None:
            raise Unavailable(f"needs {self.what}, which was not found; {self.install}")
        return file.parent

    def version(self) -> str:
        """Return the package's version; empty where it is missing."""
        file = self._package_file()
        return json.loads(file.read_text())["version"] if file else ""

    def _package_file(self) -> Path | None:
        file = Path(os.environ.get(self.variable, ""), "package.json")
        try:
            return file if json.loads(file.read_text())["name"] == self.what else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


ONNXRUNTIME_WEB = NodePackage(
    what="onnxruntime-web",
    variable="ONNXRUNTIME_WEB",
    install="npm install onnxruntime-web@1.30.0, and set ONNXRUNTIME_WEB to its folder, "
    "such as $PWD/node_modules/onnxruntime-web",
)
CHROMIUM = Requirement(
    what=next(filter(shutil.which, BROWSERS), BROWSERS[0]),
    program=True,
    install="Chromium or Chrome, e.g. apt-get install chromium",
)
