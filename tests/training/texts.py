"""A small text for tests: words of a chain in which each depends on the one before."""

from pathlib import Path

import torch

WORDS = 8


def sentences(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    lines, word = [], 0
    for jumps in torch.randint(2, (count, 9), generator=generator).tolist():
        line = []
        for jump in jumps:
            word = (3 * word + jump) % WORDS
            line.append(f"w{word}")
        lines.append(" " + " ".join(line) + " \n")
    return "".join(lines)


def write(folder: Path) -> str:
    """Writes WikiText's three files; returns the name for ``data.load_text``."""
    for seed, (part, count) in enumerate((("train", 60), ("valid", 8), ("test", 8))):
        (folder / f"wiki.{part}.tokens").write_text(sentences(count, seed))
    return f"ptb:{folder}"
