"""What holds for every test."""

import signal
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # test files run side by side, one on each core

# A job started in the background inherits an ignored Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole sessions first: they take longest, and a file stays with one worker, so none of them should begin last."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
