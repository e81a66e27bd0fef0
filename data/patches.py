"""``patches``: patches of 10 photographs, a stand-in for small colour images where no CIFAR-10 is at hand.

The photographs come with scikit-image and scikit-learn. A patch is 3 x 32 x 32, its label is the photograph that it was
cut from; training patches lie in the left 70 % of a photograph, test patches in the right 30 %, so that no pixel is in
both. This is an easy texture task, not a benchmark.
"""

import io

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data import draws, packages
from data.dataset import Bytes, DataError, Dataset, Split, from_splits

SIZE = 32
_TRAIN_PER_PHOTO, _TEST_PER_PHOTO = 1000, 200
_LEFT = 0.7
PHOTOGRAPHS = (
    ("skimage", "data/astronaut.png", "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5"),
    ("skimage", "data/chelsea.png", "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb"),
    ("skimage", "data/coffee.png", "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7"),
    ("skimage", "data/hubble_deep_field.jpg", "3a19c5dd8a927a9334bb1229a6d63711b1c0c767fb27e2286e7c84a3e2c2f5f4"),
    ("skimage", "data/ihc.png", "f8dd1aa387ddd1f49d8ad13b50921b237df8e9b262606d258770687b0ef93cef"),
    ("skimage", "data/motorcycle_left.png", "db18e9c4157617403c3537a6ba355dfeafe9a7eabb6b9b94cb33f6525dd49179"),
    ("skimage", "data/retina.jpg", "38a07f36f27f095e818aea7b96d34202c05176d30253c66733f2e00379e9e0e6"),
    ("skimage", "data/rocket.jpg", "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c"),
    ("sklearn", "datasets/images/china.jpg", "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29"),
    ("sklearn", "datasets/images/flower.jpg", "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638"),
)


def load(seed: int) -> Dataset:
    """10,000 training and 2,000 test patches; the seed decides where they are cut.

    Classes alternate (0, 1, ..., 9, 0, ...), so that every contiguous shard is balanced. The photographs are fixed by
    their SHA-256; those stored as JPEG may differ in the last bit between decoders.

    Raises:
        DataError: scikit-image, scikit-learn or pillow is not installed, or a photograph is damaged.
    """
    photographs = [_photograph(*entry) for entry in PHOTOGRAPHS]
    halves = [np.split(photograph, [int(_LEFT * photograph.shape[1])], axis=1) for photograph in photographs]
    train, test = (
        _split([half[part] for half in halves], count, seed, part)
        for part, count in enumerate((_TRAIN_PER_PHOTO, _TEST_PER_PHOTO))
    )
    return from_splits(train, test, classes=len(PHOTOGRAPHS), name="patches", title="patches of 10 photographs")


def cut(photograph: Bytes, count: int, seed: int, stream: int) -> Bytes:
    """Patches at uniformly random places.

    Args:
        photograph: [h, w, 3] uint8, at least 32 x 32.
        count: number of patches.
        seed: seed of the places.
        stream: number of the photograph; different streams are independent.

    Returns:
        [count, 3, 32, 32] uint8.
    """
    windows = sliding_window_view(photograph, (SIZE, SIZE), (0, 1))  # [h - 31, w - 31, 3, 32, 32], a view
    top = draws.below(windows.shape[0], count, seed, 2 * stream)
    left = draws.below(windows.shape[1], count, seed, 2 * stream + 1)
    return windows[top, left]


def _split(areas: list[Bytes], count: int, seed: int, part: int) -> Split:
    cuts = [cut(area, count, seed, 2 * label + part) for label, area in enumerate(areas)]
    images = np.stack(cuts, axis=1).reshape(-1, 3, SIZE, SIZE)
    return Split(images, np.tile(np.arange(len(areas), dtype=np.uint8), count))


def _photograph(package: str, file: str, sha256: str) -> Bytes:
    """[h, w, 3] uint8."""  # noqa: DOC501
    contents = packages.read(package, file, sha256)
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("patches: pillow is not installed; install it with: pip install pillow") from error
    with Image.open(io.BytesIO(contents)) as image:
        return np.asarray(image.convert("RGB"), np.uint8)
