"""Makes IDX and CIFAR-10 files, honest and hostile, byte by byte."""

import struct

import numpy as np

CIFAR_PIXELS = 3072


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def digits(count: int, seed: int, classes: int = 10, first: int = 0, side: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, side, side), dtype=np.uint8)
    labels = (first + np.arange(count) % classes).astype(np.uint8)
    return images, labels


def idx_folder(folder, *, prefixes=("train", "t10k"), counts=(20, 10), pack=bytes, ending="", **kind):
    """Writes the four files; returns the arrays of train and test."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [digits(count, seed, **kind) for seed, count in enumerate(counts)]
    for prefix, (images, labels) in zip(prefixes, parts, strict=True):
        (folder / f"{prefix}-images-idx3-ubyte{ending}").write_bytes(pack(idx(images)))
        (folder / f"{prefix}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(labels)))
    return parts


def cifar_batch(rows: int, seed: int) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, CIFAR_PIXELS), dtype=np.uint8), [int(k) for k in rng.integers(0, 10, rows)]


def _short(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode("latin1")


def python2_pickle(data: np.ndarray, labels: list[int], *, shape: tuple[int, int] | None = None) -> bytes:
    """What Python 2 and the numpy of its day wrote: protocol 2, byte strings, ``numpy.core.multiarray``."""
    raw = data.tobytes()
    rows, columns = shape or data.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85q\x03U\x01bq\x04\x87q\x05Rq\x06"
        b"(K\x01" + b"J" + struct.pack("<i", rows) + b"J" + struct.pack("<i", columns) + b"\x86q\x07"
        b"cnumpy\ndtype\nq\x08" + _short("u1") + b"K\x00K\x01\x87q\x09Rq\x0a"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", len(raw)) + raw + b"q\x0btb"
    )
    marks = b"".join(b"K" + bytes([label]) for label in labels)
    return (
        b"\x80\x02}q\x00(" + _short("batch_label") + _short("training batch 1 of 5")
        + _short("labels") + b"](" + marks + b"e" + _short("data") + array
        + _short("filenames") + b"](" + _short("a.png") + b"eu."
    )  # fmt: skip
