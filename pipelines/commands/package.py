"""`compress package`: an artifact as a container image, or as a folder that transformers opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import PipelineInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.libraries.transformers_folder import TransformersFolder
    from serve.image.build_folder import ImageFiles


def package_artifact(
    artifact: Path,
    image: Path | None,
    transformers: Path | None,
    base: Path | None,
    sign_key: Path | None,
) -> TransformersFolder | ImageFiles:
    """Write an artifact as the one folder that is named.

    Args:
        artifact: directory of the artifact.
        image: folder to write, of an image.
        transformers: folder to write, for `from_pretrained`.
        base: OCI layout that the image adds a layer to; without it a Dockerfile is written.
        sign_key: private key that signs the image's attestation.

    Raises:
        PipelineInvalid: none or both of the folders are named, or options of the other.
    """
    from pipelines.commands.verify import verify_command
    from serve.image.build_folder import write_build_folder
    from serve.image.oci_layout import write_image_layout

    def attest(file: Path) -> None:
        verify_command(artifact, attest=file, sign_key=sign_key)

    if (image is None) == (transformers is None):
        raise PipelineInvalid("name one folder to write: --image DIR or --transformers DIR")
    if image is not None:
        if base is None:
            return write_build_folder(artifact, image, attest)
        return write_image_layout(artifact, image, base, attest)
    if base or sign_key:
        raise PipelineInvalid("--base and --sign-key are for --image")
    from compress.artifacts.libraries.transformers_folder import write_transformers_folder

    assert transformers is not None
    return write_transformers_folder(artifact, transformers)
