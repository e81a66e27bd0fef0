"""A short run of the fuzzer; ``make fuzz`` has the long one."""

import collections

from tests.fuzz_wire import corpus, run


def test_damaged_frames_are_refused_or_valid() -> None:
    outcomes = collections.Counter(outcome for outcome, _ in run(mutations=3000, seed=1))
    assert outcomes["checksum wrong, refused"] > 1400
    assert outcomes["checksum right, refused"] > 1000
    assert outcomes["checksum right, valid"] > 50  # the oracle for valid frames has had work, too


def test_the_same_seed_gives_the_same_mutants() -> None:
    assert list(run(mutations=50, seed=3)) == list(run(mutations=50, seed=3))


def test_undamaged_frames_are_read() -> None:
    for frame in corpus():
        frame.read()
