"""`compress package`: a container image, or a folder that transformers opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import PipelineInvalid
from compress.pipelines.commands.verify import verify_command
from compress.serve.image.container_image import write_build_folder, write_image_layout

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.libraries.transformers_folder import TransformersFolder
    from compress.serve.image.container_image import ImageFiles


def write_package(
    artifact: Path,
    image: Path | None,
    transformers: Path | None,
    base: Path | None,
    sign_key: Path | None,
) -> ImageFiles | TransformersFolder:
    """Write the one folder that is named, an image's or one for `from_pretrained`.

    An image is a layer on the OCI layout `base`; `sign_key` signs its attestation.
    """

    def attest(file: Path) -> None:
        verify_command(artifact, attest=file, sign_key=sign_key)

    if image is not None and transformers is None:
        if base is None:
            return write_build_folder(artifact, image, attest)
        return write_image_layout(artifact, image, base, attest)
    if transformers is None or image is not None:
        raise PipelineInvalid("name one folder to write: --image DIR or --transformers DIR")
    if base or sign_key:
        raise PipelineInvalid("--base and --sign-key are for --image")
    from compress.artifacts.libraries.transformers_folder import write_transformers_folder

    return write_transformers_folder(artifact, transformers)
