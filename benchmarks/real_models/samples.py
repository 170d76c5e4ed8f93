"""Samples for the fetched models: crops of photographs, sentences, and synthesized speech.

No photograph, source file or sentence of one split is in another, so that what is held out
(`test`) was seen by no calibration and no judging.
"""

import shutil
import subprocess
import sys
import tempfile
import wave
import zlib
from pathlib import Path

import numpy as np
import torch

BENCHMARKS = Path(__file__).parents[1]
SPLITS = ("train", "val", "test")
DRAWINGS = (
    "chessboard_GRAY",
    "chessboard_RGB",
    "color",
    "horse",
    "logo",
    "page",
    "phantom",
    "text",
)
"""Images of scikit-image that show drawings or letters."""
TWINS = ("motorcycle_right",)
"""The second view of a stereo pair would show one split what another holds."""
SAMPLE_RATE = 16_000
VOICES = ("en-us", "en-gb", "en-gb-scotland", "de", "fr", "es", "it", "pt", "pl", "nl", "sv", "cs")
VARIANTS = ("m1", "m3", "m5", "m7", "f1", "f2", "f3", "f4")


def photographs(packages: Path) -> dict[str, np.ndarray]:
    """Return scikit-image's and scikit-learn's photographs as RGB, by file name."""
    import sklearn.datasets
    from PIL import Image

    folders = (packages / "skimage" / "data", Path(sklearn.datasets.__file__).parent / "images")
    files = [f for each in folders for f in each.iterdir() if f.suffix in (".png", ".jpg")]
    files = [f for f in files if f.stem not in (*DRAWINGS, *TWINS)]
    return {f.name: np.asarray(Image.open(f).convert("RGB")) for f in sorted(files)}


def split_of(names: list[str]) -> dict[str, list[str]]:
    """Return the names by split: two of five to train and test each, one to val."""
    # By a checksum of the name: independent of the alphabet, and of what else there is.
    order = sorted(names, key=lambda name: zlib.crc32(name.encode()))
    return {
        "train": order[0::5] + order[3::5],
        "val": order[1::5],
        "test": order[2::5] + order[4::5],
    }


def crops(
    images: list[np.ndarray], count: int, size: int, seed: int, smallest: float = 0.3
) -> np.ndarray:
    """Return square crops `[count, size, size, 3]` in uint8, of the images in turn.

    Args:
        images: photographs `[height, width, 3]`.
        count: number of crops.
        size: side of each crop after resizing.
        seed: of positions, sides and mirrorings.
        smallest: least side of a crop, as a share of the image's shorter one.
    """
    from PIL import Image

    generator = np.random.default_rng(seed)
    made = np.empty((count, size, size, 3), np.uint8)
    for number in range(count):
        image = images[number % len(images)]
        height, width = image.shape[:2]
        side = int(min(height, width) * generator.uniform(smallest, 1))
        top = generator.integers(height - side + 1)
        left = generator.integers(width - side + 1)
        crop = Image.fromarray(image[top : top + side, left : left + side])
        crop = np.asarray(crop.resize((size, size), Image.Resampling.BICUBIC))
        made[number] = crop[:, ::-1] if generator.random() < 0.5 else crop
    return made


def image_splits(
    packages: Path, sizes: dict[str, int], side: int, mean: float, scale: float
) -> dict[str, torch.Tensor]:
    """Return `(pixel - mean) / scale` of crops by split, `[rows, 3, side, side]`."""
    images = photographs(packages)
    names = split_of(list(images))
    made = {}
    for seed, split in enumerate(SPLITS):
        pixels = crops([images[name] for name in names[split]], sizes[split], side, seed)
        floats = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - mean) / scale
        made[split] = floats.contiguous()
    return made


def face_splits(packages: Path, sizes: dict[str, int], side: int) -> dict[str, torch.Tensor]:
    """Return crops by split, every other one a picture of scikit-image's faces and non-faces."""
    made = image_splits(packages, sizes, side, 127.5, 128)
    faces = torch.from_numpy(np.load(packages / "skimage" / "data" / "lfw_subset.npy")).float()
    order = torch.randperm(len(faces), generator=torch.Generator().manual_seed(0))
    parts = dict(zip(SPLITS, order.split([80, 40, 80]), strict=True))
    for split, crop in made.items():
        rows = faces[parts[split]][:, None] * 255
        rows = torch.nn.functional.interpolate(rows, (side, side), mode="bilinear")
        places = torch.arange(0, len(crop), 2)
        chosen = rows[torch.arange(len(places)) % len(rows)]
        crop[places] = ((chosen - 127.5) / 128).expand(-1, 3, -1, -1)
    return made


def sentences(sizes: dict[str, int]) -> dict[str, list[str]]:
    """Return sentences of the standard library's docstrings by split."""
    sys.path.insert(0, str(BENCHMARKS / "pruner"))
    from sentences import sentences as read

    texts, generator = read(), torch.Generator().manual_seed(0)
    return {
        split: [
            texts[split][i]
            for i in torch.randperm(len(texts[split]), generator=generator)[: sizes[split]].tolist()
        ]
        for split in SPLITS
    }


def speech_splits(sizes: dict[str, int], frames: int = 160) -> dict[str, torch.Tensor]:
    """Return mel spectrograms of spoken sentences by split, `[rows, frames, 40]`.

    Each split has its own sentences and its own voices.
    """
    texts = sentences(sizes)
    voices = [f"{voice}+{variant}" for voice in VOICES for variant in VARIANTS]
    own = split_of(voices)
    made = {}
    for split in SPLITS:
        rows = []
        for number, text in enumerate(texts[split]):
            voice = own[split][number % len(own[split])]
            mels = mel_spectrogram(speech(text[:120], voice))
            rows.append(np.resize(mels, (frames, mels.shape[1])))
        made[split] = torch.from_numpy(np.stack(rows))
    return made


def mel_spectrogram(sound: np.ndarray, bands: int = 40) -> np.ndarray:
    """Return powers of mel bands `[frames, bands]`, as librosa computes them by default.

    Windows of 25 ms each 10 ms, Slaney's scale and normalization.
    """
    window, hop = SAMPLE_RATE // 40, SAMPLE_RATE // 100
    padded = torch.nn.functional.pad(torch.from_numpy(sound).float(), (window // 2, window // 2))
    spectrum = torch.stft(
        padded,
        window,
        hop,
        window=torch.hann_window(window),
        center=False,
        return_complex=True,
    )
    power = spectrum.abs().square().numpy()
    edges = _hertz(np.linspace(0, _mel(SAMPLE_RATE / 2), bands + 2))
    frequencies = np.linspace(0, SAMPLE_RATE / 2, window // 2 + 1)
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    filters = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return (filters @ power).T.astype(np.float32)


# Slaney's scale: linear up to 1000 Hz, 15 mels, and 27 mels for each factor of 6.4 above.
def _mel(hertz: float) -> float:
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * np.log(hertz / 1000) / np.log(6.4)


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))


def speech(text: str, voice: str) -> np.ndarray:
    """Return a sentence spoken by a voice of espeak-ng, at 16 kHz."""
    if shutil.which("espeak-ng") is None:  # no other sound in its place: the pages name it
        raise SystemExit("speech is synthesized by espeak-ng, which is missing: apt-get install it")
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        command = ["espeak-ng", "-v", voice, "-w", file.name, "--", text]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        with wave.open(file.name) as sound:
            rate = sound.getframerate()
            integers = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
    samples = integers.astype(np.float64) / 32768
    places = np.arange(0, len(samples) - 1, rate / SAMPLE_RATE)
    return _at_volume(np.interp(places, np.arange(len(samples)), samples))


def _at_volume(sound: np.ndarray) -> np.ndarray:
    """Return a sound at -30 dB of full scale, as Resemblyzer brings it to."""
    return sound * 10**-1.5 / max(np.sqrt(np.mean(sound**2)), 1e-9)
