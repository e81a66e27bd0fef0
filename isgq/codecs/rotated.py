"""Rotated factors: the gradient as a few singular triples with quantized vectors.

Decomposition: :mod:`isgq.codecs.rotation`; which atoms and steps: :mod:`isgq.codecs.rotation_plan`; the symbols' code:
:mod:`isgq.codecs.rotation_code`. The gradient is the matrix ``[o, p]``: outputs and, flattened, all other dimensions
of the weight, and last a column for the bias (sums of d), which costs one symbol an atom.

Layout of the payload, all little-endian:

    x    shape (p,)    tensors["head"]   uint8: light (2 bytes), then for each heavy atom, and once for the light ones
                       if there are any: weight (bfloat16), step code of the left vector, of the right (a byte each)
    d    shape (o,)    tensors["code"]   uint8: symbols of all left vectors ``[k, o]``, then of all right ``[k, p]``
                       digest            from which the dithers are drawn again

A weight is rounded before it is sent, and the left vector is scaled by what the rounding took, so nothing is biased.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from isgq.codecs.dithered import Dithered
from isgq.codecs.eus_plan import usa
from isgq.codecs.eus_sample import systematic
from isgq.codecs.exact import Exact
from isgq.codecs.rotation import Atoms, atoms_of_factors, atoms_of_matrix
from isgq.codecs.rotation_code import decode_symbols, dequantize, digits_for, encode_symbols, quantize
from isgq.codecs.rotation_plan import (
    COARSEST,
    FINEST_CODE,
    Plan,
    Spectrum,
    curve,
    mmse_plan_at_slope,
    noise,
    plan_at_slope,
    slope_for_bits,
    slope_for_variance,
    step_table,
)
from isgq.core.errors import CodecError, NonFiniteError, OptionError
from isgq.core.keys import Key, uniform
from isgq.core.payload import Contract, Factors, LowRank, PairPayload, Payload, check_finite
from isgq.core.registry import register_codec

_Reals = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_EXACT, _DITHERED = Exact(), Dithered(levels=1, bucket="row")
_ENTRY, _COUNT = 4, 2  # bytes of the head
_MOST_ATOMS = (1 << 16) - 1
_EXPANSION = 512  # symbols that a byte may stand for: an entry takes 0.2 bits or more
_NMSE = 1.0  # where no option says how much is sent
_OVERSHOOT = 1.01  # how far rounding a weight to bfloat16 may stretch a vector of length 1
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class _Sent:
    """The head of a payload: one row an atom, heavy ones first.

    Attributes:
        weights: ``[k]``, values that bfloat16 has.
        codes: ``[k, 2]`` step codes, left and right.
        light: how many of them are light: they share weight and codes.
    """

    weights: _Reals
    codes: _Ints
    light: int

    def steps(self) -> _Reals:
        """Steps of the left vectors, then of the right, in units of their root mean square: ``[2 k]``."""
        steps: _Reals = step_table()[self.codes.T.reshape(-1)]
        return steps

    def group(self, outputs: int, columns: int) -> _Ints:
        """Which of the steps each symbol has: ``[k (outputs + columns)]``."""
        count = len(self.weights)
        return np.repeat(np.arange(2 * count), np.repeat([outputs, columns], count))

    def digits(self, outputs: int, columns: int) -> int:
        """Digits of the largest symbol that there can be."""
        finest = step_table()[self.codes].min(initial=COARSEST)
        return digits_for(_OVERSHOOT * math.sqrt(max(outputs, columns)) / finest)


@register_codec("rotated")
@dataclass(frozen=True)
class Rotated:
    """Singular atoms of the gradient: heavy ones always, light ones at random, vectors dithered; exactly unbiased.

    Give one of ``ratio``, ``nmse`` and ``atoms``, or none for ``nmse=1``. Integer x (indices) is sent without loss,
    and d dithered.

    Attributes:
        ratio: bytes of the float32 gradient over bytes of the record, at least 1; larger is more aggressive. Atoms and
            steps are those of least variance.
        nmse: expected squared error over squared norm; larger is more aggressive.
        cap: with ``ratio``: largest expected squared error over squared norm. Where the ratio would need more, the
            record is longer.
        atoms: how many atoms are sent, exactly, all with ``step``.
        step: with ``atoms``: of both vectors, in units of their entries' root mean square, at most 3.5; larger is
            more aggressive.
        mode: ``"unbiased"``, or ``"mmse"``: the least error that the bytes allow, without any randomness. What is left
            out is biased, so this is for one worker, for files, or with error feedback. Not with ``atoms``.
    """

    ratio: float | None = None
    nmse: float | None = None
    atoms: int | None = None
    step: float = 2.0
    cap: float = 8.0
    mode: Literal["unbiased", "mmse"] = "unbiased"
    name: ClassVar[str]

    def __post_init__(self) -> None:
        given = [n for n in ("ratio", "nmse", "atoms") if getattr(self, n) is not None]
        if len(given) > 1:
            raise OptionError(f"rotated takes one of ratio, nmse and atoms, got {' and '.join(given)}")
        if self.ratio is not None and not 1 <= self.ratio < math.inf:
            raise OptionError(f"ratio={self.ratio} of rotated must be 1 or more")
        if self.mode not in {"unbiased", "mmse"}:
            raise OptionError(f"mode is {self.mode!r}, must be 'unbiased' or 'mmse'")
        if self.mode == "mmse" and self.atoms is not None:
            raise OptionError("rotated:mode=mmse takes ratio or nmse: it needs no number of atoms")
        if self.nmse is not None and not 0 < self.nmse < math.inf:
            raise OptionError(f"nmse={self.nmse} of rotated must be positive")
        if not 0 < self.cap < math.inf:
            raise OptionError(f"cap={self.cap} of rotated must be positive")
        if self.atoms is not None and not 1 <= self.atoms <= _MOST_ATOMS:
            raise OptionError(f"atoms={self.atoms} of rotated must be in 1 .. {_MOST_ATOMS}")
        if not step_table()[-1] <= self.step <= COARSEST:
            raise OptionError(f"step={self.step} of rotated must be in {step_table()[-1]:.0e} .. {COARSEST}")

    @property
    def unbiased(self) -> bool:
        """Whether the mode is so called."""
        return self.mode == "unbiased"

    def digests(self, key: Key) -> tuple[int, int]:
        """That of d alone is used, and is the key's own."""
        return 0, key.digest

    # ---- encoding

    @torch.no_grad()
    def encode_pair(self, factors: Factors, contract: Contract, key: Key) -> PairPayload:
        """Decompose, plan, draw, quantize; see the module's docstring.

        Raises:
            NonFiniteError: NaN or Inf in a factor, or a gradient beyond float32.
        """
        if not factors.x.is_floating_point():
            x, d = _EXACT.encode(factors.x, key), _DITHERED.encode(factors.d, key)
            return PairPayload(self.name, x, d)
        atoms = decompose(factors, contract, key)
        return self.encode_atoms(atoms, self.plan(spectrum_of(atoms)), factors.d.dtype, key)

    def plan(self, spectrum: Spectrum) -> Plan:
        """What to send of a gradient's atoms, by these options."""
        if self.atoms is not None:
            return _plan_of_atoms(spectrum, self.atoms, self.step)
        planner = plan_at_slope if self.unbiased else mmse_plan_at_slope
        if not spectrum.energy:
            return planner(spectrum, 1.0)
        if self.ratio is None:
            slope = slope_for_variance([spectrum], (self.nmse or _NMSE) * spectrum.energy, planner)
        else:
            size = 32 * spectrum.outputs * spectrum.columns
            slope = slope_for_bits([spectrum], size / self.ratio, planner)
            slope = min(slope, slope_for_variance([spectrum], self.cap * spectrum.energy, planner))
        return planner(spectrum, slope)

    def variance(self, factors: Factors, contract: Contract) -> float:
        """Expected squared error of gradient and bias gradient: closed form, exact but for the weights' rounding.

        Args:
            factors: floating-point.
            contract: of the layer.
        """
        return self.plan(spectrum_of(decompose(factors, contract, Key("variance")))).variance

    def encode_atoms(self, atoms: Atoms, plan: Plan, dtype: torch.dtype, key: Key) -> PairPayload:
        """Draw the light atoms, quantize and code all that are sent.

        Args:
            atoms: of the gradient.
            plan: for their spectrum, by whatever rule.
            dtype: of the gradient.
            key: of the tensor.
        """
        digest = key.digest
        index, weights = _draw(atoms, plan, digest)
        light = len(index) - plan.heavy
        codes = np.concatenate([plan.codes, np.tile(plan.light_codes, (light, 1))])
        rounded = torch.tensor(weights).to(torch.bfloat16)
        sent = _Sent(rounded.double().numpy(), codes, light)
        left, right = (
            side[torch.from_numpy(index).to(side.device)].cpu().numpy() for side in (atoms.left, atoms.right)
        )
        left = left * (weights / sent.weights)[:, None]
        entries = np.concatenate([(v * math.sqrt(v.shape[1])).reshape(-1) for v in (left, right)])
        outputs, columns = left.shape[1], right.shape[1]
        steps, group = sent.steps(), sent.group(outputs, columns)
        dither = _dither(digest, len(index), outputs, columns) if self.unbiased else None
        symbols = quantize(entries / steps[group], dither)
        code = encode_symbols(symbols, dither, group, steps, sent.digits(outputs, columns))
        head = torch.frombuffer(bytearray(_write_head(sent)), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(code), dtype=torch.uint8) if code else torch.empty(0, dtype=torch.uint8)
        device = atoms.left.device
        return PairPayload(
            self.name,
            Payload(self.name, (columns,), dtype, {}, {"head": head.to(device)}),
            Payload(self.name, (outputs,), dtype, {}, {"code": body.to(device)}, digest if self.unbiased else 0),
        )

    # ---- decoding

    @torch.no_grad()
    def decode_pair(self, payload: PairPayload) -> Factors | LowRank:
        """Rebuild the atoms; of integer x, the factors.

        Raises:
            CodecError: a malformed payload.
        """
        if payload.codec != self.name:
            raise CodecError(f"codec {self.name!r} cannot decode a payload of codec {payload.codec!r}")
        if payload.x.codec != self.name:
            return Factors(_EXACT.decode(payload.x), _DITHERED.decode(payload.d))
        [columns], [outputs] = _one_size(payload.x), _one_size(payload.d)
        code = _raw(payload.d, "code")
        sent = _read_head(_raw(payload.x, "head"))
        count = len(sent.weights) * (outputs + columns)
        if count > _EXPANSION * (len(code) + 64):
            raise CodecError(f"{len(code)} bytes of a rotated payload cannot hold {count} symbols")
        steps, group = sent.steps(), sent.group(outputs, columns)
        dither = _dither(payload.d.digest, len(sent.weights), outputs, columns) if self.unbiased else None
        symbols = decode_symbols(code, dither, group, steps, sent.digits(outputs, columns))
        entries = dequantize(symbols, dither, group, steps)
        split = len(sent.weights) * outputs
        left = entries[:split].reshape(-1, outputs) * (sent.weights / math.sqrt(max(outputs, 1)))[:, None]
        right = entries[split:].reshape(-1, columns) / math.sqrt(max(columns, 1))
        device = payload.d.tensors["code"].device
        # Decoded values reach beyond the vector by half a step, which may be beyond float32.
        sides = (torch.from_numpy(v).clamp_(-_LARGEST, _LARGEST).float().to(device) for v in (left, right))
        return LowRank(*sides)


def spectrum_of(atoms: Atoms) -> Spectrum:
    """The weights of atoms, on the host."""
    return Spectrum(atoms.weights.cpu().numpy(), atoms.left.shape[1], atoms.right.shape[1])


def decompose(factors: Factors, contract: Contract, key: Key) -> Atoms:
    """Atoms of the gradient as a matrix ``[o, p]``, the last column that of the bias.

    From the factors where they are plain rows, fewer than the matrix is wide; otherwise from the gradient.

    Args:
        factors: floating-point.
        contract: of the layer.
        key: names the tensor in messages.

    Raises:
        NonFiniteError: NaN or Inf in a factor, or a gradient beyond float32.
    """
    x, d = factors.x.detach(), factors.d.detach()
    check_finite(x, f"the input of {key.name!r}")
    check_finite(d, f"the output gradient of {key.name!r}")
    if x.dim() == 2 and x.shape[0] <= min(d.shape[1], x.shape[1] + 1):
        atoms = atoms_of_factors(torch.cat([x, x.new_ones(len(x), 1)], 1), d)
    else:
        gradient = contract(x.float(), d.float())
        channel = d.dim() - 1 if gradient.dim() == 2 else 1  # of a linear layer the last, of a convolution the second
        bias = d.double().sum([i for i in range(d.dim()) if i != channel])
        atoms = atoms_of_matrix(torch.cat([gradient.reshape(gradient.shape[0], -1).double(), bias[:, None]], 1))
    if atoms.weights.numel() and not float(atoms.weights[0]) < _LARGEST:
        raise NonFiniteError(f"the gradient of {key.name!r} reaches beyond float32")
    kept = int((atoms.weights.to(torch.bfloat16) > 0).sum())
    return Atoms(atoms.weights[:kept], atoms.left[:kept], atoms.right[:kept])


def _plan_of_atoms(spectrum: Spectrum, count: int, step: float) -> Plan:
    """As many atoms as asked for, with one step: efficient unbiased sparsification of the spectrum."""
    w = spectrum.weights
    chosen = usa(torch.from_numpy(w), count) if len(w) else None
    heavy, tau = (len(chosen.heavy), chosen.level) if chosen is not None else (0, 0.0)
    code = np.full(2, np.abs(step_table() - step).argmin())
    kappa = float(np.prod(1 + noise(code)) - 1)
    light, sent = w[heavy:], count - heavy if tau else 0
    variance = (
        (w[:heavy] ** 2).sum() * kappa + (light * tau * (1 + kappa) - light**2).sum() if tau else kappa * (w**2).sum()
    )
    bits = curve(spectrum.outputs, spectrum.columns).bits[0] * (heavy + sent)
    return Plan(heavy, np.tile(code, (heavy, 1)), code, tau, float(variance), float(bits))


def _draw(atoms: Atoms, plan: Plan, digest: int) -> tuple[_Ints, _Reals]:
    """Atoms that are sent, heavy ones first, and their weights.

    Light ones are drawn with probability ``w / tau``; where these sum to no integer, an atom that does not exist makes
    up for what is missing, and is not sent.
    """
    w = atoms.weights.cpu()
    index, weights = torch.arange(plan.heavy), w[: plan.heavy]
    light = w[plan.heavy :]
    if plan.tau and light.numel():
        expected = float(light.sum()) / plan.tau
        count = max(1, math.ceil(expected - 1e-9))
        pool = torch.cat([light, light.new_full((1,), max(0.0, count - expected) * plan.tau)])
        drawn = systematic(pool, count, digest)
        drawn = drawn[drawn < light.numel()]
        index = torch.cat([index, plan.heavy + drawn])
        weights = torch.cat([weights, weights.new_full((drawn.numel(),), plan.tau)])
    return index.numpy(), weights.numpy()


def _dither(digest: int, count: int, outputs: int, columns: int) -> _Reals:
    """Dither of all symbols, in their order."""
    parts = [uniform(digest, "rotated.left", (count * outputs,)), uniform(digest, "rotated.right", (count * columns,))]
    dither: _Reals = torch.cat(parts).double().numpy()
    return dither


def _write_head(sent: _Sent) -> bytes:
    entries = len(sent.weights) - max(sent.light - 1, 0)
    weights = torch.from_numpy(sent.weights[:entries]).to(torch.bfloat16).view(torch.int16).numpy().astype("<i2")
    rows = np.concatenate([weights.view(np.uint8).reshape(-1, 2), sent.codes[:entries].astype(np.uint8)], 1)
    return sent.light.to_bytes(_COUNT, "little") + rows.tobytes()


def _read_head(head: bytes) -> _Sent:
    entries, rest = divmod(len(head) - _COUNT, _ENTRY)
    if entries < 0 or rest:
        raise CodecError(f"head of a rotated payload has {len(head)} bytes, must be {_COUNT} and {_ENTRY} an entry")
    light = int.from_bytes(head[:_COUNT], "little")
    if light and not entries:
        raise CodecError(f"head of a rotated payload has {light} light atoms and no entry for them")
    rows = np.frombuffer(head[_COUNT:], dtype=np.uint8).reshape(entries, _ENTRY)
    raw = np.ascontiguousarray(rows[:, :2]).view("<i2").reshape(-1).astype(np.int16)
    weights = torch.from_numpy(raw).view(torch.bfloat16).double().numpy()
    codes = rows[:, 2:].astype(np.int64)
    if not (np.isfinite(weights) & (weights > 0)).all() or (codes > FINEST_CODE).any():
        raise CodecError(f"head of a rotated payload has weights {weights} and step codes {codes.tolist()}")
    repeats = np.ones(entries, dtype=np.int64)
    if light:
        repeats[-1] = light
    return _Sent(np.repeat(weights, repeats), np.repeat(codes, repeats, axis=0), light)


def _one_size(payload: Payload) -> tuple[int, ...]:
    if payload.codec != "rotated" or len(payload.shape) != 1:
        raise CodecError(f"part of a rotated payload is {payload.codec!r} of shape {payload.shape}")
    return payload.shape


def _raw(payload: Payload, name: str) -> bytes:
    tensor = payload.tensors.get(name)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise CodecError(f"rotated payload lacks the bytes {name!r}; it has {sorted(payload.tensors)}")
    return tensor.cpu().numpy().tobytes()
