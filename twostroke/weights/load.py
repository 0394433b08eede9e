"""From an opened checkpoint to a model on a device.

Strict: a tensor that is missing, left over or of another shape than the architecture says is an error that names it.
Careful with memory: tensors stay mapped bytes until the backend packs them, one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from twostroke.errors import ModelError
from twostroke.model.arch import Arch, DenseArch, ExpertsArch, GroupedArch, LayerArch, Rope
from twostroke.model.compressed import CompressedArch
from twostroke.model.latent import Latent, LatentArch
from twostroke.model.layers import Dense, Experts, Feed, Grouped, Layer, Mixer, SharedExpert
from twostroke.model.names import ignorable, parameter_sources
from twostroke.model.rope_table import rope_table
from twostroke.model.shares import BY_COLUMNS, BY_ROWS, Share, divided
from twostroke.model.transformer import Transformer
from twostroke.ops.arrays import placed
from twostroke.ops.formats import INTEGERS, Stored, dequantize, from_float, in_own_order, integers
from twostroke.ops.interface import Array, Attention, ExpertSet, Gate, LatentAttention, Norm, Ops, RopeTable, Weight
from twostroke.ops.streams import StreamMix
from twostroke.ops.streams import pack as pack_streams
from twostroke.weights.checkpoint import Checkpoint
from twostroke.weights.compressed import load_compressed
from twostroke.weights.describe import load_arch, whole_tensors
from twostroke.weights.files import OnProgress
from twostroke.weights.latent import key_parts, value_parts
from twostroke.weights.mxfp4 import joined_mxfp4
from twostroke.weights.published import Coded
from twostroke.weights.quantize import quantize

if TYPE_CHECKING:
    import torch

CENTERED_POSITIONS = 8192  # of the mean of rotated biases
LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the config says of the others: as transformers


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    max_positions: int,
    progress: OnProgress | None = None,
    bits: str | None = None,
    share: Share | None = None,
    make: Callable[..., Transformer] = Transformer,
) -> Transformer:
    """Pack every parameter for `ops`. max_positions: the longest context that will be asked for.

    bits: "int8" or "int4" for the layers' matrices; embedding and head, where every error is seen, get int8 in both.
    share: of one rank of several; `make` then makes a `ParallelTransformer`.
    """
    arch = load_arch(checkpoint)
    parameters = Parameters(checkpoint, arch, ops, progress, bits, share)
    arch = arch if share is None else divided(arch, share.parts)
    ropes = RopeTables(max_positions, ops.device)
    layers = [_layer(parameters, layer, f"layers.{index}.", ropes) for index, layer in enumerate(arch.layers)]
    embedding = parameters.matrix("embedding")
    follows = share is not None and share.rank > 0  # the rank that leads makes the logits
    return make(
        arch,
        ops,
        embedding=embedding,
        layers=layers,
        final_norm=parameters.norm("final_norm"),
        head=embedding if arch.tied_head or follows else parameters.matrix("head"),
        max_positions=max_positions,
        head_streams=parameters.streams("streams") if arch.streams > 1 else None,
    )


class RopeTables:
    """One table for each kind of rotation in a model."""

    def __init__(self, max_positions: int, device: torch.device | None):
        self.max_positions, self.device = max_positions, device
        self._made: dict[Rope, RopeTable] = {}

    def get(self, rope: Rope | None) -> RopeTable | None:
        if rope is None:
            return None
        if rope not in self._made:
            self._made[rope] = rope_table(rope, self.max_positions, self.device)
        return self._made[rope]


def _layer(parameters: Parameters, arch: LayerArch, stem: str, ropes: RopeTables) -> Layer:
    streams = None
    if parameters.arch.streams > 1:
        streams = parameters.streams(f"{stem}attention_streams"), parameters.streams(f"{stem}feed_streams")
    return Layer(_mixer(parameters, arch, stem, ropes), _feed(parameters, arch, stem), streams)


def _mixer(parameters: Parameters, arch: LayerArch, stem: str, ropes: RopeTables) -> Mixer:
    mixer = arch.mixer
    if isinstance(mixer, LatentArch):
        return _latent(parameters, mixer, stem, ropes)
    if isinstance(mixer, CompressedArch):
        return load_compressed(parameters, mixer, stem, ropes)
    assert isinstance(mixer, GroupedArch)
    attention = Attention(
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        scale=mixer.factor,
        window=mixer.window or 0,
        softcap=mixer.softcap,
        rope=ropes.get(mixer.rope),
        query_norm=parameters.norm(f"{stem}q_norm") if mixer.qk_norm else None,
        key_norm=parameters.norm(f"{stem}k_norm") if mixer.qk_norm else None,
        key_center=parameters.key_center(f"{stem}k_bias", mixer),
        sinks=parameters.vector(f"{stem}sinks") if mixer.sinks else None,
    )
    return Grouped(
        norm=parameters.norm(f"{stem}attention_norm"),
        qkv=parameters.matrix(f"{stem}q", f"{stem}k", f"{stem}v"),
        attention=attention,
        output=parameters.matrix(f"{stem}output"),
        out_norm=parameters.norm(f"{stem}attention_out_norm") if arch.out_norms else None,
        wide_norms=(parameters.norm(f"{stem}q_norm"), parameters.norm(f"{stem}k_norm")) if mixer.wide_qk_norm else None,
    )


def _latent(parameters: Parameters, mixer: LatentArch, stem: str, ropes: RopeTables) -> Latent:
    rope = ropes.get(mixer.rope)
    assert rope is not None
    attention = LatentAttention(
        heads=mixer.heads,
        latent=mixer.latent,
        plain_dim=mixer.plain_dim,
        rope_dim=mixer.rope_dim,
        value_dim=mixer.value_dim,
        scale=mixer.factor,
        rope=rope,
        norm=parameters.norm(f"{stem}latent_norm", LATENT_EPS),
        key_up=parameters.heads(mixer, stem, "k_b"),
        value_up=parameters.heads(mixer, stem, "v_b"),
    )
    low_rank = mixer.query_rank is not None
    return Latent(
        norm=parameters.norm(f"{stem}attention_norm"),
        latents=parameters.matrix(f"{stem}{'q_a' if low_rank else 'q'}", f"{stem}kv_a"),
        query_width=mixer.query_rank or mixer.query_width,
        query_norm=parameters.norm(f"{stem}query_norm", LATENT_EPS) if low_rank else None,
        queries=parameters.matrix(f"{stem}q_b") if low_rank else None,
        attention=attention,
        output=parameters.matrix(f"{stem}output"),
    )


def _feed(parameters: Parameters, arch: LayerArch, stem: str) -> Feed:
    norm = parameters.norm(f"{stem}feed_norm")
    out_norm = parameters.norm(f"{stem}feed_out_norm") if arch.out_norms else None
    if isinstance(arch.feed, ExpertsArch):
        return _experts(parameters, arch.feed, stem, norm, out_norm)
    assert isinstance(arch.feed, DenseArch)
    return Dense(
        norm=norm,
        gate_up=parameters.matrix(f"{stem}gate", f"{stem}up"),
        gate=Gate(arch.feed.activation),
        down=parameters.matrix(f"{stem}down"),
        out_norm=out_norm,
    )


def _experts(parameters: Parameters, feed: ExpertsArch, stem: str, norm: Norm, out_norm: Norm | None) -> Experts:
    """The router keeps its precision: it is small, and a rounding could change which experts are chosen."""
    gate_up, down = [], []
    for expert in range(feed.routing.experts):
        place = f"{stem}experts.{expert}."
        gate_up.append(parameters.matrix(f"{place}gate", f"{place}up", expert=True))
        down.append(parameters.matrix(f"{place}down", expert=True))
    found = ExpertSet(
        routing=feed.routing,
        router=parameters.matrix(f"{stem}router", exact=True),
        correction=parameters.vector(f"{stem}correction") if feed.corrected else None,
        gate_up=tuple(gate_up),
        gate=Gate(feed.activation),
        down=tuple(down),
        table=parameters.table(f"{stem}table", feed.routing.experts) if feed.by_token else None,
    )
    shared = None
    if feed.shared:
        both = parameters.matrix(f"{stem}shared_gate", f"{stem}shared_up")
        shared = SharedExpert(both, parameters.matrix(f"{stem}shared_down"))
    return Experts(norm, found, shared, out_norm)


def mean_rotated(bias: np.ndarray, rope: Rope | None) -> np.ndarray:
    """The mean of (heads, head_dim) over the first positions, each rotated to its place. Pairs of dimensions that turn
    slowly keep their bias, fast ones have a mean of almost nothing. Any constant would be right here, so the result is
    rounded to eighths: every machine gets the same bits."""
    if rope is not None:
        table = rope_table(rope, CENTERED_POSITIONS, None)
        cos, sin = (np.asarray(part, np.float64).mean(axis=0) for part in (table.cos, table.sin))
        first, second, rest = np.split(bias.astype(np.float64), [len(cos), 2 * len(cos)], axis=1)
        bias = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=1)
    return (np.round(bias * 8) / 8).astype(np.float32)


class Parameters:
    """Hands out parameters by our names, checked once against the checkpoint when it is made."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        arch: Arch,
        ops: Ops,
        progress: OnProgress | None = None,
        bits: str | None = None,
        share: Share | None = None,
    ):
        self.arch, self.ops, self.progress, self.bits, self.share = arch, ops, progress, bits, share
        self.tensors, self.where = whole_tensors(checkpoint), checkpoint.path.name
        self.sources = parameter_sources(arch, checkpoint.kind, self.tensors.keys())
        self._check_names()
        self._check_shapes()
        self.done, self.total = 0, sum(tensor.nbytes for tensor in self.tensors.values())

    def matrix(self, *names: str, exact: bool = False, expert: bool = False) -> Weight:
        """The named matrices stacked along their outputs, with their biases if the family has them. exact: they keep
        the precision of the file."""
        parts = [self._stored(name) for name in names]
        outer = not names[0].startswith("layers.")
        if self.bits is not None and not exact:
            bits = "int8" if outer else self.bits
            parts = [self._quantized(name, part, bits) for name, part in zip(names, parts, strict=True)]
        narrow = self.ops.pack_outer if outer else self.ops.pack_expert if expert else self.ops.pack
        pack = self.ops.pack_precisely if exact else narrow
        weight = pack(parts, self._bias(names))
        self._advance(names)
        return weight

    def _quantized(self, name: str, part: Stored, bits: str) -> Stored:
        try:
            return quantize(part, bits)
        except ValueError as error:
            tensor = self.sources[name].tensor
            raise ModelError(
                f"{self.where}: {tensor} {error}, which {bits} cannot store. The file is damaged: fetch or convert it "
                "again."
            ) from None

    def norm(self, name: str, eps: float | None = None) -> Norm:
        weight = dequantize(self._stored(name)) + np.float32(self.sources[name].add)
        self._advance((name,))
        return Norm(placed(weight, self.ops.device), self.arch.norm_eps if eps is None else eps)

    def heads(self, mixer: LatentArch, stem: str, name: str) -> Weight:
        """A matrix for each head, from the latent attention's `k_b` or `v_b`, or from its part of `kv_b`."""
        apart = f"{stem}{name}" in self.sources
        stored = self._stored(f"{stem}{name}" if apart else f"{stem}kv_b")
        parts = (key_parts if name == "k_b" else value_parts)(in_own_order(stored), mixer)
        if self.bits is not None:
            parts = [self._quantized(f"{stem}{name}" if apart else f"{stem}kv_b", part, self.bits) for part in parts]
        if apart or name == "v_b":
            self._advance((f"{stem}{name}" if apart else f"{stem}kv_b",))
        return self.ops.pack_precisely(parts)

    def vector(self, name: str) -> Array:
        values = dequantize(self._stored(name))
        self._advance((name,))
        return placed(values, self.ops.device)

    def table(self, name: str, experts: int) -> Array:
        """A table from tokens to experts."""
        values = integers(self._stored(name))
        if values.min() < 0 or values.max() >= experts:
            tensor = self.sources[name].tensor
            raise ModelError(f"{self.where}: {tensor} names experts outside 0 to {experts - 1}. The file is damaged.")
        self._advance((name,))
        return placed(np.array(values, np.int32, order="C"), self.ops.device)

    def streams(self, name: str) -> StreamMix:
        """The weights that mix several residual streams."""
        arch, weight = self.arch, pack_streams(self.ops, [self._stored(name)])
        self._advance((name,))
        ones = np.ones(arch.streams * arch.hidden, np.float32)
        return StreamMix(
            streams=arch.streams,
            norm=Norm(placed(ones, self.ops.device), arch.norm_eps),
            weight=weight,
            base=self.vector(f"{name}_base"),
            scale=self.vector(f"{name}_scale"),
            eps=arch.stream_eps,
            rounds=arch.stream_rounds,
        )

    def key_center(self, name: str, mixer: GroupedArch) -> Array | None:
        # A norm and a cap change a constant part of the keys. A sink would lose against scores that all moved.
        if name not in self.sources or mixer.qk_norm or mixer.softcap or mixer.sinks:
            return None
        bias = dequantize(self._stored(name)).reshape(mixer.kv_heads, mixer.head_dim)
        return placed(mean_rotated(bias, mixer.rope), self.ops.device)

    def _bias(self, names: tuple[str, ...]) -> Array | None:
        if not any(f"{name}_bias" in self.sources for name in names):
            return None
        if self.share is not None and self.share.rank > 0 and kind_of(names[0]) in BY_COLUMNS:
            return None  # one rank adds it
        parts = [
            dequantize(self._stored(f"{name}_bias"))
            if f"{name}_bias" in self.sources
            else np.zeros(self._stored(name).shape[0], np.float32)
            for name in names
        ]
        return placed(np.concatenate(parts), self.ops.device)

    def _stored(self, name: str) -> Stored:
        """A tensor, or the part of it that this rank has."""
        whole = self._whole(name)
        if self.share is None or not name.startswith("layers."):
            return whole
        if kind_of(name) in BY_ROWS:
            return whole.rows(*self.share.span(whole.shape[0]))
        if kind_of(name) not in BY_COLUMNS:
            return whole
        first, end = self.share.span(whole.shape[1])
        if self.bits is not None or getattr(self.ops, "quantize", None) is not None:
            return from_float(dequantize(whole)[:, first:end])  # it is quantized after this
        try:
            return whole.columns(first, end)
        except ValueError as error:
            tensor, parts = self.sources[name].tensor, self.share.parts
            raise ModelError(
                f"{self.where}: parallel={parts} cannot divide {tensor}: {error}. Give quantize=int8, which converts "
                "the weights, or leave parallel out."
            ) from None

    def _whole(self, name: str) -> Stored:
        source = self.sources[name]
        stored = self._tensor(source.tensor)
        if source.entry is not None:
            stored = stored.entry(source.entry)
        if source.scales:
            scales = self._tensor(source.scales)
            stored = joined_mxfp4(stored, scales if source.entry is None else scales.entry(source.entry))
        if source.transposed:
            stored = from_float(np.ascontiguousarray(dequantize(stored).T))
        if source.step > 1:
            assert source.rows is not None
            return stored.take_rows(np.arange(*source.rows, source.step))
        if source.rows is not None:
            stored = stored.rows(*source.rows)
        if not source.paired_heads:
            return stored
        return stored.take_rows(halves_order(stored.shape[0], source.paired_heads, source.paired_tail))

    def _tensor(self, name: str) -> Stored:
        found = self.tensors[name]
        return found.decode() if isinstance(found, Coded) else found

    def _advance(self, names: tuple[str, ...]) -> None:
        self.done += sum(self._stored_bytes(name) for name in names)
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)

    def _stored_bytes(self, name: str) -> int:
        source = self.sources[name]
        whole, shape = self.tensors[source.tensor].nbytes, source.shape
        if source.entry is not None:
            whole, shape = whole // shape[0], shape[1:]
        return whole * len(range(*source.rows, source.step)) // shape[0] if source.rows else whole

    def _check_names(self) -> None:
        wanted = {source.tensor for source in self.sources.values()}
        wanted |= {source.scales for source in self.sources.values() if source.scales}
        missing = sorted(wanted - self.tensors.keys())
        if missing:
            raise ModelError(f"{self.where}: {_listed(missing)} missing; the checkpoint is incomplete: fetch it again.")
        left = sorted(
            name
            for name in self.tensors.keys() - wanted
            if not ignorable(name, self.arch) and not self._empty_bias(name)
        )
        if left:
            raise ModelError(
                f"{self.where}: {_listed(left)} left over; this is not a plain {self.arch.family} model, and running it"
                " without them would give wrong answers."
            )

    def _empty_bias(self, name: str) -> bool:
        """Zeros that some tools write beside each coded matrix."""
        matrix = self.tensors.get(f"{name.removesuffix('.bias')}.weight")
        return name.endswith(".bias") and isinstance(matrix, Coded) and not dequantize(self._tensor(name)).any()

    def _check_shapes(self) -> None:
        shapes = {source.tensor: source.shape for source in self.sources.values()}
        shapes |= {source.scales: source.shape[:-1] for source in self.sources.values() if source.scales}
        parts = {name for source in self.sources.values() if source.scales for name in (source.tensor, source.scales)}
        tables = {source.tensor for source in self.sources.values() if source.integers}
        for name, shape in shapes.items():
            found = self.tensors[name]
            if found.shape != shape:
                raise self._unfit(name, f"has shape {found.shape}, expected {shape}")
            if (found.format in INTEGERS) != (name in tables):
                kind = "whole numbers" if name in tables else "floats"
                raise self._unfit(name, f"has dtype {found.format}; it must hold {kind}")
            if (found.format == "U8") != (name in parts):
                kind = "bytes" if name in parts else "floats"
                raise self._unfit(name, f"has dtype {found.format}; it must hold {kind}")

    def _unfit(self, name: str, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {name} {reason}. Weights and description do not fit: fetch both again.")


def kind_of(name: str) -> str:
    return name.rpartition(".")[2]


def halves_order(rows: int, heads: int, tail: int = 0) -> np.ndarray:
    """For each row in rotate-half order, its row where a head's pairs are neighbours: 0 2 4 … 1 3 5 … of every head.
    tail: only so many rows at the end of a head are pairs."""
    order = np.arange(rows).reshape(heads, rows // heads)
    pairs = order[:, -tail:]  # all of them where tail is 0
    order[:, -tail:] = pairs.reshape(heads, pairs.shape[1] // 2, 2).swapaxes(1, 2).reshape(pairs.shape)
    return order.reshape(rows)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more tensors are" if len(names) > 4 else f"{shown} {_are(names)}"


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"
