"""A shared store on a real S3-compatible server on loopback, which is moto's."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compress.artifacts.artifact import Artifact
from compress.common.errors import PipelineInvalid
from compress.pipelines.results.schema import Report
from compress.pipelines.store.gc import clean, clean_shared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("s3fs", "moto", "flask", "flask_cors"))),
        reason="needs s3fs and moto's server: pip install s3fs 'moto[s3]' flask flask-cors",
    ),
    # Of botocore and moto, about themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
DIES_IN_MID_UPLOAD = """
import os, signal, sys
from pathlib import Path
from compress.pipelines.store.remote import Objects
from compress.pipelines import Pipeline

write, left = Objects.write, int(sys.argv[3])

def counted(self, name, content):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    write(self, name, content)

Objects.write = counted
out = Path(sys.argv[1]).parent / "out"
Pipeline.from_yaml(sys.argv[1]).run(out, until="train", store=sys.argv[2])
"""


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()
    }


def _copy(project, name: str):
    """Return the project as another machine has it: without what was made."""
    folder = shutil.copytree(project.folder, project.folder.with_name(name))
    shutil.rmtree(folder / "out")
    return type(project)(Path(folder))


def test_two_folders_share_a_bucket_and_a_flipped_byte_is_refused(project, bucket) -> None:
    import s3fs

    url = f"{bucket}/some/prefix"
    project.run(store=url)
    assert project.ran() == {}
    second = _copy(project, "second")
    second.run(store=url)
    assert second.ran() == {}, "wholly cached"
    names = {"source", "train", "prune_channels", "export_onnx"}
    assert {p.name for p in (second.out / "artifacts").iterdir()} == names
    assert _bytes_of(second.out / "artifacts") == _bytes_of(project.out / "artifacts")
    assert {s.fetched_from for s in Report.read(second.out).stages} == {url}
    written = "".join(f.read_text() for f in second.out.glob("[!.]*.*"))
    assert "a-secret-of-mine" not in written and "an-id" not in written

    pruned = Artifact.from_directory(project.out / "artifacts" / "prune_channels")
    place = f"{url}/files/{pruned.manifest.files[pruned.payload_name].sha256}"
    files = s3fs.S3FileSystem()
    content = bytearray(files.cat_file(place))
    content[len(content) // 2] ^= 1
    files.pipe_file(place, bytes(content))
    third, fourth = _copy(project, "third"), _copy(project, "fourth")
    third.run(store=url, until="prune_channels")
    assert set(third.ran()) == {"prune_channels"}
    assert (
        f"warning: {place}: is not what its name says; it is refused, and made anew" in third.said
    )
    made = third.out / "artifacts" / "prune_channels"
    assert _bytes_of(made) == _bytes_of(pruned.path), "the same seed, the same bytes"
    fourth.run(store=url, until="prune_channels")
    assert fourth.ran() == {}, "it was mended"

    kept = len(files.find(url))
    assert clean(url, "2d", False, print).artifacts == 0
    cleaned = clean_shared(url, -60, dry_run=True)  # what will be written in the next minute too
    assert (cleaned.artifacts, cleaned.kept, len(files.find(url))) == (len(names), 0, kept)
    assert clean_shared(url, -60, dry_run=False).bytes == cleaned.bytes > pruned.payload_bytes
    files.invalidate_cache()
    assert [place.rpartition("/")[2] for place in files.find(url)] == ["format.json"]


@pytest.mark.soak  # test_remote.py kills uploads anywhere
def test_a_run_killed_in_mid_upload_leaves_no_half(project, bucket, tmp_path) -> None:
    # Writes: the format, the source's files, manifest and record, then those of the training.
    source = len(Artifact.from_directory(project.out / "artifacts" / "source").manifest.files)
    script = tmp_path / "dies.py"
    script.write_text(DIES_IN_MID_UPLOAD)
    command = [sys.executable, str(script), str(project.file), bucket, str(1 + source + 2 + 1)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    died = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert died.returncode == -signal.SIGKILL, died.stderr
    second = _copy(project, "second")
    second.run(store=bucket, until="train")
    assert set(second.ran()) == {"train"}, "the source was whole, the training was not"
    assert not [line for line in second.said if "warning" in line]
    third = _copy(project, "third")
    third.run(store=bucket, until="train")
    assert third.ran() == {}
    assert _bytes_of(third.out / "artifacts") == _bytes_of(second.out / "artifacts")


def test_a_bucket_that_is_not_there_is_one_line(project, bucket) -> None:
    with pytest.raises(PipelineInvalid, match=r"store s3://no-such.*cannot be written") as refused:
        project.run(store=f"s3://no-such-{bucket[5:]}/x")
    assert "\n" not in str(refused.value) and "a-secret-of-mine" not in str(refused.value)
