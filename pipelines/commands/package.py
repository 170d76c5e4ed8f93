"""`compress package`: writes a container image, or a folder that transformers opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid

if TYPE_CHECKING:
    from pathlib import Path


def write_package(
    artifact: Path,
    image: Path | None,
    transformers: Path | None,
    base: Path | None,
    sign_key: Path | None,
) -> Any:
    """Write one folder, and return what is in it, as a dataclass with `lines()`.

    Raises:
        PipelineInvalid: none or both of the folders are named, or an option is for the other one.
    """
    if (image is None) == (transformers is None):
        raise PipelineInvalid("name one folder to write: --image DIR or --transformers DIR")
    if transformers is not None:
        if base or sign_key:
            raise PipelineInvalid("--base and --sign-key are for --image")
        from compress.artifacts.libraries.transformers_folder import write_transformers_folder

        return write_transformers_folder(artifact, transformers)
    from pipelines.commands.verify import verify_command
    from serve.image.build_folder import write_build_folder
    from serve.image.oci_layout import write_image_layout

    def attest(file: Path) -> None:
        verify_command(artifact, attest=file, sign_key=sign_key)

    assert image is not None
    if base is None:
        return write_build_folder(artifact, image, attest)
    return write_image_layout(artifact, image, base, attest)
