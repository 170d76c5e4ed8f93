"""`compress serve` for an archive: the real TorchServe in the foreground."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from compress.common.errors import PipelineInvalid
from compress.core.context import Context
from compress.serve.http.options import Limits, Options
from compress.serve.serve_command import serve_artifacts
from compress.serve.torchserve.stage import PackageTorchServe
from tests.serve.served_here import COMPRESS, ROOT, sealed

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]


def test_an_archive_is_served_until_a_signal_and_the_curl_line_works(tmp_path: Path) -> None:
    model = sealed(tmp_path / "onnx")
    archive = PackageTorchServe(gates=()).run(model, Context(root=tmp_path / "mar"))
    bare = shutil.copyfile(archive.payload_path, tmp_path / "bare.mar")
    command = [*COMPRESS, "serve", str(bare), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        where, curl = process.stdout.readline(), process.stdout.readline()
        assert "served by TorchServe at http://127.0.0.1:" in where
        done = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["outputs"]["double"] == [[0.0] * 4]
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []


def test_options_that_torchserve_does_not_take_are_refused(tmp_path: Path) -> None:
    model = sealed(tmp_path / "onnx")
    archive = PackageTorchServe(gates=()).run(model, Context(root=tmp_path / "mar"))
    for options in (Options(host="0.0.0.0"), Options(workers=2), Options(limits=Limits(queue=3))):
        with pytest.raises(PipelineInvalid, match="options but --port, --threads and --sha256 out"):
            serve_artifacts([archive.path], options, None, print)
    with pytest.raises(PipelineInvalid, match="leave all options"):
        serve_artifacts([archive.path], Options(), tmp_path / "token", print)
