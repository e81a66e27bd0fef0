"""Rotated factors: the gradient as a few singular triples with quantized vectors.

Decomposition: :mod:`isgq.codecs.rotation`; which atoms and steps: :mod:`isgq.codecs.rotation_plan`; symbols:
:mod:`isgq.codecs.rotation_grid`; their code: :mod:`isgq.codecs.rotation_code`. The gradient is the matrix ``[o, p]``:
outputs and, flattened, all other dimensions of the weight, and last a column for the bias (sums of d), which costs one
symbol an atom.

Layout of the payload, all little-endian:

    x    shape (p,)    tensors["head"]   uint8: light (2 bytes), then for each heavy atom, and once for the light ones
                       if there are any: weight (bfloat16), step code of the left vector, of the right (a byte each)
                       digest            with learned bases: what sender and receiver must have learned; else 0
    d    shape (o,)    tensors["code"]   uint8: symbols of all left vectors ``[k, o]``, then of all right ``[k, p]``
                       digest            from which the dithers are drawn again

A weight is rounded before it is sent, and the left vector is scaled by what the rounding took, so nothing is biased.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch

from isgq.codecs.bases import Bases, Known, nothing_known
from isgq.codecs.dithered import Dithered
from isgq.codecs.exact import Exact
from isgq.codecs.flat import require_codec
from isgq.codecs.rotation import Atoms, decompose
from isgq.codecs.rotation_grid import Grid, scale
from isgq.codecs.rotation_head import MOST_ATOMS, Head, light_of
from isgq.codecs.rotation_plan import (
    Plan,
    Spectrum,
    draw,
    expected_bits,
    mmse_plan_at_slope,
    plan_at_slope,
    plan_of_atoms,
    slope_for_bits,
    slope_for_variance,
)
from isgq.codecs.rotation_sides import COARSEST, Ints, step_table
from isgq.core.errors import CodecError, NonFiniteError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Contract, Factors, LowRank, PairPayload, Payload
from isgq.core.registry import register_codec

_EXACT, _DITHERED = Exact(), Dithered(levels=1, bucket="row")
_EXPANSION = 512  # symbols that a byte may stand for: an entry takes 0.2 bits or more
_FRAMING = 8  # bytes of a record's form and sizes, about
_NMSE = 1.0  # where no option says how much is sent
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Prepared:
    """A gradient that is decomposed but not yet planned."""

    atoms: Atoms
    known: Known
    dtype: torch.dtype
    key: Key


@dataclass(frozen=True, slots=True)
class _Made(PairPayload):
    """What was encoded here, so that the sender, who needs its own message like all others, need not read it.

    Attributes:
        parts: the payload's own; one whose parts were replaced is read.
        content: what :meth:`Rotated._read` finds in them.
        unbiased: whether the mode was.
    """

    parts: tuple[Payload, Payload] = field(repr=False, compare=False)
    content: tuple[Head, Grid, Ints] = field(repr=False, compare=False)
    unbiased: bool = field(repr=False, compare=False)


def _made(payload: PairPayload, unbiased: bool) -> tuple[Head, Grid, Ints] | None:
    """The content of what was encoded here, in the same mode."""
    if not isinstance(payload, _Made) or payload.unbiased is not unbiased:
        return None
    own = payload.parts[0] is payload.x and payload.parts[1] is payload.d
    return payload.content if own else None


@register_codec("rotated")
@dataclass(frozen=True)
class Rotated:
    """Singular atoms of the gradient: heavy ones always, light ones at random, vectors dithered; exactly unbiased.

    Give one of ``ratio``, ``bytes_per_step``, ``nmse`` and ``atoms``, or none for ``nmse=1``. Atoms and steps are those
    of least variance for the bytes. Integer x (indices) is sent without loss, and d dithered; neither that nor what a
    session sends without factors is in the budget.

    Attributes:
        ratio: bytes of the float32 gradients over bytes of their records and all headers, at least 1; larger is more
            aggressive.
        bytes_per_step: the bytes themselves, that a rank sends in a step; smaller is more aggressive.
        nmse: expected squared error over squared norm; larger is more aggressive.
        cap: with ``ratio`` and ``bytes_per_step``: largest expected squared error over squared norm. Where the bytes
            would need more, more are sent, which the session's log says once.
        share: who shares the bytes, or the error: ``"model"``, all layers of a session together, by one slope;
            ``"layer"``, each has its own ratio or error.
        atoms: how many atoms are sent, exactly, all with ``step``.
        step: with ``atoms``: of both vectors, in units of their entries' root mean square, at most 3.5; larger is
            more aggressive.
        mode: ``"unbiased"``, or ``"mmse"``: the least error that the bytes allow, without any randomness. What is left
            out is biased, so this is for one worker, for files, or with error feedback. Not with ``atoms``.
        bases: ``"learned"`` sends vectors in coordinates that all ranks learn from what they have decoded
            (:mod:`isgq.codecs.bases`): half the error for the same bytes. They are part of a session's state. Only
            where all ranks decode all messages (``aggregate="gather"``), and with ``mode="unbiased"``.
    """

    ratio: float | None = None
    nmse: float | None = None
    atoms: int | None = None
    step: float = 2.0
    cap: float = 8.0
    bytes_per_step: float | None = None
    share: Literal["model", "layer"] = "model"
    mode: Literal["unbiased", "mmse"] = "unbiased"
    bases: Literal["standard", "learned"] = "standard"
    learned: Bases = field(default_factory=Bases, init=False, repr=False, compare=False)
    name: ClassVar[str]

    def __post_init__(self) -> None:
        given = [n for n in ("ratio", "bytes_per_step", "nmse", "atoms") if getattr(self, n) is not None]
        if len(given) > 1:
            raise OptionError(f"rotated takes one of ratio, bytes_per_step, nmse and atoms, got {' and '.join(given)}")
        if self.share not in {"model", "layer"}:
            raise OptionError(f"share is {self.share!r}, must be 'model' or 'layer'")
        if self.bytes_per_step is not None and not (1 <= self.bytes_per_step < math.inf and self.share == "model"):
            raise OptionError(f"bytes_per_step={self.bytes_per_step} of rotated must be 1 or more, with share=model")
        if self.ratio is not None and not 1 <= self.ratio < math.inf:
            raise OptionError(f"ratio={self.ratio} of rotated must be 1 or more")
        if self.mode not in {"unbiased", "mmse"}:
            raise OptionError(f"mode is {self.mode!r}, must be 'unbiased' or 'mmse'")
        if self.bases not in {"standard", "learned"}:
            raise OptionError(f"bases is {self.bases!r}, must be 'standard' or 'learned'")
        if self.bases == "learned" and self.mode == "mmse":
            raise OptionError("rotated:bases=learned is for mode=unbiased")
        if self.mode == "mmse" and self.atoms is not None:
            raise OptionError("rotated:mode=mmse takes ratio or nmse: it needs no number of atoms")
        if self.nmse is not None and not 0 < self.nmse < math.inf:
            raise OptionError(f"nmse={self.nmse} of rotated must be positive")
        if not 0 < self.cap < math.inf:
            raise OptionError(f"cap={self.cap} of rotated must be positive")
        if self.atoms is not None and not 1 <= self.atoms <= MOST_ATOMS:
            raise OptionError(f"atoms={self.atoms} of rotated must be in 1 .. {MOST_ATOMS}")
        if not step_table()[-1] <= self.step <= COARSEST:
            raise OptionError(f"step={self.step} of rotated must be in {step_table()[-1]:.0e} .. {COARSEST}")

    @property
    def unbiased(self) -> bool:
        """Whether the mode is so called."""
        return self.mode == "unbiased"

    def digests(self, key: Key) -> tuple[int, int]:
        """What is known of the layer, and the key's own."""
        return self.common.address(key.name) if self.common else 0, key.digest

    @property
    def common(self) -> Bases | None:
        """The learned bases."""
        return self.learned if self.bases == "learned" else None

    def known(self, name: str, atoms: Atoms) -> Known:
        """What sender and receiver know of the layer."""
        sizes = atoms.left.size, atoms.right.size
        return self.common.of(name, *sizes) if self.common else nothing_known(*sizes)

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
        known = self.known(key.name, atoms)
        spectra = [spectrum_of(atoms, known)]
        [plan], _ = self.plans(spectra, self.budget(spectra))
        return self.encode_atoms(atoms, plan, factors.d.dtype, key, known)

    @property
    def together(self) -> bool:
        """Whether all layers share."""
        return self.share == "model" and self.atoms is None

    @torch.no_grad()
    def prepare(self, factors: Factors, contract: Contract, key: Key) -> Prepared | PairPayload:
        """Decompose.

        Raises:
            NonFiniteError: as for :meth:`encode_pair`.
        """
        if not factors.x.is_floating_point():
            return self.encode_pair(factors, contract, key)
        atoms = decompose(factors, contract, key)
        return Prepared(atoms, self.known(key.name, atoms), factors.d.dtype, key)

    @torch.no_grad()
    def encode_together(
        self, prepared: Sequence[Prepared], overhead: int, say: Callable[[str], None]
    ) -> list[PairPayload]:
        """Plan for all layers together, then as :meth:`encode_pair`.

        How many bits entries take depends on how they are distributed. So that a budget is kept, the plan is tried out,
        with other random numbers so that nothing becomes biased, and made again for as much more or less.
        """
        spectra = [spectrum_of(each.atoms, each.known) for each in prepared]
        bits = self.budget(spectra, overhead)
        plans, capped = self.plans(spectra, bits)
        if bits is not None and not capped:
            trial = [
                self.encode_atoms(p.atoms, plan, p.dtype, p.key.child("trial"), p.known)
                for p, plan in zip(prepared, plans, strict=True)
            ]
            taken = 8 * sum(
                each.x.tensors["head"].numel() + each.d.tensors["code"].numel() + _FRAMING for each in trial
            )
            light = [light_of(_raw(each.x, "head")) for each in trial]
            expected = math.fsum(map(expected_bits, spectra, plans, light))
            plans, capped = self.plans(spectra, bits * expected / taken)
        if capped:
            asked = f"bytes_per_step={self.bytes_per_step}" if self.ratio is None else f"ratio={self.ratio}"
            say(
                f"rotated:{asked} would leave an error of more than cap={self.cap} times the squared gradient, so more "
                "bytes are sent"
            )
        return [
            self.encode_atoms(p.atoms, plan, p.dtype, p.key, p.known) for p, plan in zip(prepared, plans, strict=True)
        ]

    def budget(self, spectra: Sequence[Spectrum], overhead: int = 0) -> float | None:
        """Bits for the records of these gradients together, if the options say how many; may be negative.

        Args:
            spectra: of the gradients that share.
            overhead: bytes that are sent besides the records.
        """
        size = self.bytes_per_step
        if self.ratio is not None:
            size = 4 * sum(spectrum.left.size * spectrum.right.size for spectrum in spectra) / self.ratio
        return None if size is None else 8 * (size - overhead)

    def plans(self, spectra: Sequence[Spectrum], bits: float | None = None) -> tuple[list[Plan], bool]:
        """What to send of gradients' atoms, by these options and one slope, and whether the cap needs more bits.

        Args:
            spectra: of the gradients that share.
            bits: for all of them, if limited.
        """
        if self.atoms is not None:
            return [plan_of_atoms(spectrum, self.atoms, self.step) for spectrum in spectra], False
        planner = plan_at_slope if self.unbiased else mmse_plan_at_slope
        energy, slope, capped = math.fsum(spectrum.energy for spectrum in spectra), 1.0, False
        if energy and bits is not None:
            slope = slope_for_bits(spectra, bits, planner)
            most = slope_for_variance(spectra, self.cap * energy, planner)
            slope, capped = min(slope, most), most < slope
        elif energy:
            slope = slope_for_variance(spectra, (self.nmse or _NMSE) * energy, planner)
        return [planner(spectrum, slope) for spectrum in spectra], capped

    def variance(self, factors: Factors, contract: Contract) -> float:
        """Expected squared error of gradient and bias gradient: closed form, exact but for the weights' rounding.

        With learned bases, that of a layer of which nothing is known yet.

        Args:
            factors: floating-point.
            contract: of the layer.
        """
        atoms = decompose(factors, contract, Key("variance"))
        spectra = [spectrum_of(atoms, nothing_known(atoms.left.size, atoms.right.size))]
        [plan], _ = self.plans(spectra, self.budget(spectra))
        return plan.variance

    def encode_atoms(
        self, atoms: Atoms, plan: Plan, dtype: torch.dtype, key: Key, known: Known | None = None
    ) -> PairPayload:
        """Draw the light atoms, quantize and code all that are sent.

        Args:
            atoms: of the gradient.
            plan: for their spectrum, by whatever rule.
            dtype: of the gradient.
            key: of the tensor.
            known: of the layer, if not by the key's name.

        Raises:
            NonFiniteError: a weight is beyond what can be sent.
        """
        known = known or self.known(key.name, atoms)
        digest = key.digest
        index, weights = draw(atoms.weights.cpu(), plan, digest)
        light = len(index) - plan.heavy
        codes = np.concatenate([plan.codes, plan.light_codes[None].repeat(light, 0)])
        head = Head(torch.from_numpy(weights).to(torch.bfloat16).double().numpy(), codes, light)
        if not np.isfinite(head.weights).all():  # also where a light atom's weight is above the gradient's
            raise NonFiniteError(f"the gradient of {key.name!r} reaches beyond what is sent as its weights")
        device = atoms.weights.device
        chosen = torch.from_numpy(index).to(device)
        left, right = (
            side.turn(vectors[chosen].cpu()).numpy()
            for side, vectors in ((known.left, atoms.left), (known.right, atoms.right))
        )
        left = left * (weights / head.weights)[:, None]
        grid = Grid.of(codes, known, digest if self.unbiased else None)
        symbols = grid.symbols(left, right)
        code = grid.write(symbols)
        packed = torch.frombuffer(bytearray(head.pack()), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(code), dtype=torch.uint8) if code else torch.empty(0, dtype=torch.uint8)
        x = Payload(self.name, (right.shape[1],), dtype, {}, {"head": packed.to(device)}, known.address)
        d = Payload(self.name, (left.shape[1],), dtype, {}, {"code": body.to(device)}, digest if self.unbiased else 0)
        return _Made(self.name, x, d, (x, d), (head, grid, symbols), self.unbiased)

    # ---- decoding

    @torch.no_grad()
    def decode_pair(self, payload: PairPayload) -> Factors | LowRank:
        """Rebuild the atoms; of integer x, the factors.

        Raises:
            CodecError: a malformed payload.
        """
        require_codec(payload, self.name)
        if payload.x.codec != self.name:
            return Factors(_EXACT.decode(payload.x), _DITHERED.decode(payload.d))
        [columns], [outputs] = _one_size(payload.x), _one_size(payload.d)
        known = self._known_at(payload.x.digest, outputs, columns)
        head, grid, symbols = _made(payload, self.unbiased) or self._read(payload, known)
        left, right = grid.vectors(symbols)
        if self.common:
            self.common.hear(known, left, right, head.codes)
        left, right = known.left.turn_back(left), known.right.turn_back(right)
        device = payload.d.tensors["code"].device
        return LowRank(*(side.to(device) for side in scale(left, right, head.weights)))

    def _read(self, payload: PairPayload, known: Known) -> tuple[Head, Grid, Ints]:
        """Head, grid and symbols; CodecError if it is malformed."""  # noqa: DOC501
        code = _raw(payload.d, "code")
        head = Head.unpack(_raw(payload.x, "head"))
        count = len(head.weights) * (known.left.size + known.right.size)
        if count > _EXPANSION * (len(code) + 64):
            raise CodecError(f"{len(code)} bytes of a rotated payload cannot hold {count} symbols")
        grid = Grid.of(head.codes, known, payload.d.digest if self.unbiased else None)
        return head, grid, grid.read(code)

    def _known_at(self, address: int, outputs: int, columns: int) -> Known:
        if self.common:
            return self.common.at(address, outputs, columns)
        if address:
            raise CodecError("a rotated payload was encoded with bases=learned, this codec has bases=standard")
        return nothing_known(outputs, columns)


def spectrum_of(atoms: Atoms, known: Known | None = None) -> Spectrum:
    """The weights of atoms, on the host, and the sides that their vectors have."""
    known = known or nothing_known(atoms.left.size, atoms.right.size)
    return Spectrum(atoms.weights.cpu().numpy(), known.left, known.right)


def _one_size(payload: Payload) -> tuple[int, ...]:
    if payload.codec != "rotated" or len(payload.shape) != 1:
        raise CodecError(f"part of a rotated payload is {payload.codec!r} of shape {payload.shape}")
    return payload.shape


def _raw(payload: Payload, name: str) -> bytes:
    tensor = payload.tensors.get(name)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise CodecError(f"rotated payload lacks the bytes {name!r}; it has {sorted(payload.tensors)}")
    return tensor.cpu().numpy().tobytes()
