"""The layout ``hf``: Megatron's tensors, divided and named as in models of transformers.

The reader plans with it on each rank for ``layout="hf"``; a conversion to Megatron applies the plan backwards. Each
name of transformers must come from one tensor only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rankless.engine.plan.element_ranges import ElementRange
from rankless.errors import FormatError
from rankless.formats.chunked_tensor_slices import JoinedTensor
from rankless.megatron.reader.hf_families import Family, choose_family
from rankless.megatron.reader.hf_pieces import AttentionRows, TransformersPiece, check_rows, split_halves
from rankless.megatron.reader.layer_names import layer_of
from rankless.megatron.reader.model_args import ModelArgs

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_QKV = "self_attention.linear_qkv."

#: The ends of the names of norms, which have other names in other layer specs.
_NORMS = (".layer_norm_weight", ".layer_norm_bias", "input_layernorm.weight", "pre_mlp_layernorm.weight")

#: How many names that are missing are listed in a message.
_SHOWN = 8

#: The beginning of the names of experts in a layer.
EXPERT = "mlp.experts.local_experts."


def plan_pieces(
    weights: Mapping[str, JoinedTensor], args: ModelArgs, vocab_size: int | None
) -> dict[str, tuple[TransformersPiece, ...]]:
    """Return the pieces that each tensor of a model consists of, by Megatron's name.

    ``vocab_size`` is the number of rows of the embedding without padding; ``None`` for the one in the arguments.

    Raises ``FormatError`` if the arguments describe no known family, or tensors that the family does not have.
    """
    return _Planner(weights, args, choose_family(args), vocab_size).plan_all()


def tied_name(pieces: Mapping[str, tuple[TransformersPiece, ...]], args: ModelArgs) -> tuple[str, str] | None:
    """Return the name of the output layer that shares the embedding's tensor, and the embedding's; or ``None``."""
    if OUTPUT in pieces or EMBEDDING not in pieces:
        return None
    return choose_family(args).ends[OUTPUT], pieces[EMBEDDING][0].target


@dataclass(frozen=True)
class _Planner:
    weights: Mapping[str, JoinedTensor]
    args: ModelArgs
    family: Family
    vocab_size: int | None

    def plan_all(self) -> dict[str, tuple[TransformersPiece, ...]]:
        self._check_layers()
        pieces = {name: tuple(self._plan_tensor(name)) for name in self.weights}
        targets = [piece.target for row in pieces.values() for piece in row]
        if len(set(targets)) < len(targets):
            raise FormatError(
                f"{self.args.source}: two tensors would get the same name in a model of the family {self.family.name}"
            )
        missing = [name for name in self.family.ends if name not in self.weights and name != OUTPUT]
        if missing or (OUTPUT not in self.weights and self.args.is_set("untie_embeddings_and_output_weights")):
            raise FormatError(
                f"{self.args.source} has no {', '.join(missing) or OUTPUT}, which a model of the family "
                f"{self.family.name} has: {self.args.advice}"
            )
        return pieces

    def _check_layers(self) -> None:
        """Raise ``FormatError`` if layers are missing, or do not all have the same tensors."""
        inner: dict[int, set[str]] = {}
        for name in self.weights:
            if name.startswith("decoder.layers.") and (layer := layer_of(name)) is not None:
                inner.setdefault(layer, set()).add(name.removeprefix(f"decoder.layers.{layer}."))
        expected = self.args.require_size("num_layers")
        if (
            len(inner) != expected
            or set(inner) != set(range(expected))
            or any(names != inner[0] for names in inner.values())
        ):
            raise FormatError(
                f"{self.args.source} has tensors of {len(inner)} layers, and by args it should have {expected} equal "
                f"layers: {self.args.advice}"
            )
        required = (name for name in self._required_names() if name not in inner[0])
        missing = dict.fromkeys(itertools.islice(required, _SHOWN))
        if missing:
            raise FormatError(
                f"{self.args.source}: its layers have no {', '.join(missing)}, which a model of "
                f"the family {self.family.name} has: {self.args.advice}"
            )

    def _required_names(self) -> Iterator[str]:
        """Yield the names in a layer that a family always has: by the arguments, there may be very many."""
        yield from (f"{_QKV}weight", "self_attention.linear_proj.weight")
        if self.family.experts:
            count = self.args.require_size("num_experts")
            yield from (f"{EXPERT}{n}.linear_fc{k}.weight" for n in range(count) for k in (1, 2))
        yield from (name for name in self.family.inner if not name.endswith(_NORMS))

    def _plan_tensor(self, name: str) -> Iterator[TransformersPiece]:
        layer = layer_of(name) if name.startswith("decoder.layers.") else None
        if layer is None:
            yield self._plan_end(name)
            return
        inner, prefix = name.removeprefix(f"decoder.layers.{layer}."), self.family.prefix.format(layer)
        if self.family.experts and inner.startswith(EXPERT):
            yield from self._plan_expert(name, inner.removeprefix(EXPERT), prefix)
            return
        targets = tuple(f"{prefix}{target}" for target in self.family.inner.get(inner, ()))
        if not targets:
            raise self._foreign_error(name)
        yield from self._plan_inner(name, inner, targets)

    def _plan_inner(self, name: str, inner: str, targets: tuple[str, ...]) -> Iterator[TransformersPiece]:
        is_attention = inner in {f"{_QKV}weight", f"{_QKV}bias"}
        if is_attention:
            yield from self._plan_attention(name, targets)
        elif len(targets) == 2:  # noqa: PLR2004 - a gate and a projection
            check_rows(self.weights[name], 2 * self.args.require_size("ffn_hidden_size"), name, self.args.source)
            yield from split_halves(*targets, name, self.weights[name].info.shape[0])
        else:
            yield TransformersPiece(targets[0], name, is_transposed=self.family.is_transposed)

    def _plan_attention(self, name: str, targets: tuple[str, ...]) -> Iterator[TransformersPiece]:
        rows = AttentionRows.from_args(self.args)
        check_rows(self.weights[name], rows.total, name, self.args.source)
        blocks = rows.query, rows.key, rows.value
        if len(targets) == len(blocks):
            yield from (TransformersPiece(target, name, block) for target, block in zip(targets, blocks, strict=True))
        elif self.family.is_transposed:
            yield TransformersPiece(targets[0], name, (*rows.query, *rows.key, *rows.value), is_transposed=True)
        else:
            yield TransformersPiece(targets[0], name)

    def _plan_end(self, name: str) -> TransformersPiece:
        target = self.family.ends.get(name)
        if target is None:
            raise self._foreign_error(name)
        if name not in {EMBEDDING, OUTPUT}:
            return TransformersPiece(target, name)
        rows = self.weights[name].info.shape[0]
        vocab_size = self.vocab_size or self.args.require_size("vocab_size", rows)
        if vocab_size > rows:
            raise FormatError(f"{self.args.source}: {name!r} has {rows} rows, fewer than the vocab_size {vocab_size}")
        return TransformersPiece(target, name, () if vocab_size == rows else (ElementRange(0, vocab_size),))

    def _plan_expert(self, name: str, inner: str, prefix: str) -> Iterator[TransformersPiece]:
        number, _, kind = inner.partition(".")
        if self.family.experts is None or kind not in {"linear_fc1.weight", "linear_fc2.weight"}:
            raise self._foreign_error(name)
        gate, projection, output = (prefix + target.format(number) for target in self.family.experts)
        if kind == "linear_fc1.weight":
            size = self.args.require_size("moe_ffn_hidden_size", self.args.require_size("ffn_hidden_size"))
            check_rows(self.weights[name], 2 * size, name, self.args.source)
            yield from split_halves(gate, projection, name, 2 * size)
        else:
            yield TransformersPiece(output, name)

    def _foreign_error(self, name: str) -> FormatError:
        return FormatError(
            f"{self.args.source}: a model of the family {self.family.name}, which its args describe, has no {name!r}: "
            f"{self.args.advice}"
        )
