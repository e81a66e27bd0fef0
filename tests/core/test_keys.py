"""The counter hash: golden values, an oracle in plain Python, and streams that look random."""

import hashlib

import pytest
import torch

from isgq.core.errors import OptionError
from isgq.core.keys import Key, random_int32, to_uniform, uniform

WORD = 1 << 32

# (digest, role, start) -> first values; the protocol depends on every bit of them.
GOLDEN_DIGESTS = [
    (Key("fc1.weight"), 136360770177770741),
    (Key("fc1.weight", seed=1, step=2, rank=3), 5097771672401945568),
]
GOLDEN_WORDS = [
    (0, "dither", 0, [-1270495578, -943208316, -1507284199, -2126260011]),
    (2**64 - 1, "x", 5, [858082016, 175990062, -2051451908, -450342730]),
    (12345, "dither", 2**31 - 2, [-15473562, 602401908, -1356217615, -1208837521]),
]


def signed(word):
    return word - WORD if word >= WORD // 2 else word


def oracle(digest, role, index):
    """One element, straight from the documentation of the module."""
    block, low = divmod(index, 1 << 31)
    text = digest.to_bytes(8, "little") + block.to_bytes(8, "little") + role.encode()
    raw = hashlib.blake2b(text, digest_size=16, person=b"isgq-stream").digest()
    k0, k1, k2, k3 = (int.from_bytes(raw[i : i + 4], "little") for i in (0, 4, 8, 12))
    x = (low + k0) % WORD
    x ^= x >> 17
    x = (x * 0xED5AD4BB + k1) % WORD
    x ^= x >> 11
    x = (x * 0xAC4C1B51 + k2) % WORD
    x ^= x >> 15
    x = (x * 0x31848BAB + k3) % WORD
    x ^= x >> 14
    return signed(x)


@pytest.mark.parametrize(("key", "digest"), GOLDEN_DIGESTS)
def test_golden_digests(key, digest):
    assert key.digest == digest


@pytest.mark.parametrize(("digest", "role", "start", "words"), GOLDEN_WORDS)
def test_golden_streams(digest, role, start, words):
    assert random_int32(digest, role, len(words), start=start).tolist() == words


@pytest.mark.parametrize("start", [0, 1, 65_535, 2**31 - 3, 2**31, 5 * 2**31 - 1, 2**40 + 7])
def test_equals_the_oracle(start):
    digest = Key("w", seed=7).digest
    assert random_int32(digest, "role", 6, start=start).tolist() == [
        oracle(digest, "role", start + i) for i in range(6)
    ]


@pytest.mark.parametrize("cut", [1, 1000, 65_536, 131_073])
def test_pieces_make_up_the_stream(cut):
    n, start = 200_000, 2**31 - 100_000
    whole = random_int32(3, "a", n, start=start)
    assert torch.equal(whole[:cut], random_int32(3, "a", cut, start=start))
    assert torch.equal(whole[cut:], random_int32(3, "a", n - cut, start=start + cut))
    assert torch.equal(uniform(3, "a", (n,), start=start), to_uniform(whole))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("start", [0, 2**31 - 100])
def test_devices_agree(start):
    assert torch.equal(uniform(9, "a", (1 << 20,), "cuda", start=start).cpu(), uniform(9, "a", (1 << 20,), start=start))


def test_every_part_of_a_key_counts():
    keys = [
        Key("a"),
        Key("b"),
        Key("a", seed=1),
        Key("a", step=1),
        Key("a", rank=1),
        Key("a").child("x"),
        Key("a").child("d"),
    ]
    assert len({k.digest for k in keys}) == len(keys)
    # No two fields run into one another.
    assert Key("a", 1, 11).digest != Key("a", 11, 1).digest


def test_child_keeps_the_rest_of_the_key():
    child = Key("w", seed=1, step=2, rank=3).child("x")
    assert (child.seed, child.step, child.rank, child.name) == (1, 2, 3, "w/x")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (2, 3, 5)])
def test_shapes(shape):
    u = uniform(1, "a", shape)
    assert u.shape == shape
    assert u.dtype == torch.float32
    assert torch.equal(u.reshape(-1), uniform(1, "a", (u.numel(),)))


@pytest.mark.parametrize(("n", "start"), [(-1, 0), (1, -1)])
def test_refuses_negative_ranges(n, start):
    with pytest.raises(OptionError, match="must be >= 0"):
        random_int32(0, "a", n, start=start)


def test_uniform_is_open_and_symmetric():
    extremes = to_uniform(torch.tensor([-(2**31), 2**31 - 1, 0, -1], dtype=torch.int32))
    assert extremes.tolist() == [-0.5 + 2.0**-25, 0.5 - 2.0**-25, 2.0**-25, -(2.0**-25)]


N = 1 << 20
STREAMS = [(Key("w").digest, "dither"), (Key("w", step=1).digest, "dither"), (0, ""), (1, "x")]


@pytest.mark.parametrize(("digest", "role"), STREAMS)
def test_moments(digest, role):
    u = uniform(digest, role, (N,)).double()
    moments = torch.stack([u.mean() * 12**0.5, (u.square() * 12 - 1).mean() / 0.8**0.5, (u**3).mean() * 448**0.5])
    assert (moments.abs() * N**0.5 < 4.5).all(), moments  # in standard errors


@pytest.mark.parametrize(("digest", "role"), STREAMS)
def test_equidistribution(digest, role):
    """Chi-square of the leading byte, of the lowest byte, and of pairs of neighbours."""
    bits = random_int32(digest, role, N).long() % WORD
    for cell in (bits >> 24, bits & 255, (bits[::2] >> 28) * 16 + (bits[1::2] >> 28)):
        expected = cell.numel() / 256
        chi2 = ((torch.bincount(cell, minlength=256) - expected) ** 2 / expected).sum()
        assert abs(chi2 - 255) < 4.5 * (2 * 255) ** 0.5


@pytest.mark.parametrize(("digest", "role"), STREAMS)
def test_no_serial_correlation(digest, role):
    u = uniform(digest, role, (N,)).double() * 12**0.5
    for lag in (1, 2, 3, 64, 1000, 65_536):
        assert abs((u[lag:] * u[:-lag]).mean()) * N**0.5 < 4.5, lag


def test_no_repetition():
    assert random_int32(5, "a", N).unique().numel() == N


def test_streams_are_independent():
    """Streams of neighbouring keys, of the factors of one key and of roles: no correlation at any small shift."""
    keys = [Key("w", step=s).digest for s in range(4)] + [Key("w").child(c).digest for c in "xd"]
    streams = [uniform(d, "dither", (N // 4,)).double() for d in keys] + [uniform(keys[0], "other", (N // 4,)).double()]
    table = torch.stack(streams) * 12**0.5
    for shift in (0, 1, 2, 17):
        correlation = table @ table.roll(shift, 1).T / (N // 4)
        off = correlation - torch.diag(correlation.diagonal()) if shift == 0 else correlation
        assert off.abs().max() * (N // 4) ** 0.5 < 4.8


def test_a_flipped_bit_of_the_digest_flips_half_of_all_bits():
    base = random_int32(Key("w").digest, "a", 4096)
    for bit in (0, 31, 63):
        other = random_int32(Key("w").digest ^ (1 << bit), "a", 4096)
        flipped = sum(((base ^ other) >> b & 1).double().mean() for b in range(32)) / 32
        assert abs(flipped - 0.5) < 0.01
