"""The verb ``resize-vocab``: rows of the embedding and of the head, and of their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec.structs import replace

from rankless.edits.catalog import (
    MASTERS,
    Catalog,
    Change,
    Parameter,
    is_one_value,
    keep_name,
    map_parameters,
)
from rankless.edits.config_parts import change_parts, iterate_parts
from rankless.edits.formulas import RowRange, Zeros, cast, join_rows, with_rows
from rankless.edits.row_rules import RowRule, describe_size, parse_rule
from rankless.errors import InvalidArgumentError
from rankless.formats.edited_reader import EditedTensor
from rankless.formats.reader import UnreadTensorNote
from rankless.ondisk.validation import state_key

#: The most rows of an embedding after an edit.
_MOST_ROWS = 2**27

#: The ends of names of embeddings, in the models of transformers, torchtitan, Megatron and others.
_EMBEDDINGS = (
    *("embed_tokens.weight", "wte.weight", "tok_embeddings.weight", "word_embeddings.weight", "embed_in.weight"),
    *("tokens_embed.weight", "shared.weight", "embeddings.weight", "token_embedding.weight", "embedding.weight"),
    "embed.weight",
)

#: The ends of names of other tensors that have a row for each token as well.
_HEADS = (
    *("lm_head.weight", "lm_head.bias", "embed_out.weight", "output.weight", "output_layer.weight", "head.weight"),
    *("head.bias", "final_logits_bias", "predictions.bias", "predictions.decoder.weight", "predictions.decoder.bias"),
)


#: Entries of ``config.json`` that name tokens of text: each has a row.
_TOKENS = frozenset(
    f"{kind}_token_id"
    for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "decoder_start", "forced_bos", "forced_eos")
)


class ResizeVocab(msgspec.Struct, frozen=True, tag_field="verb", tag="resize-vocab", forbid_unknown_fields=True):
    """Give embedding and head another number of rows, and the optimizer states of both, too.

    New rows of weights are filled by ``rows``: ``mean`` of all rows, ``zeros``, ``copy:ROW``, or ``normal:STD``. If an
    optimizer has the weights in a higher precision, the new rows are computed there. New rows of moments are zeros.

    Args:
        size: The new number of rows.
        rows: The rule for new rows.
        tensors: Shell patterns of the names of embedding and head. By default they are found by their names.
        seed: The seed of ``normal``.
    """

    size: int
    rows: str = "mean"
    tensors: list[str] = []
    seed: int = 0

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog with other rows. Raises ``InvalidArgumentError``."""
        catalog.check_no_adapters("resize-vocab")
        if not 0 < self.size <= _MOST_ROWS:
            raise InvalidArgumentError(f"resize-vocab: size must be 1 to {_MOST_ROWS}; got {self.size}")
        rule = parse_rule(self.rows, self.seed)
        names = self._find_names(catalog)
        changes: list[Change] = []
        reconstructed: list[str] = []
        unread: list[UnreadTensorNote] = []

        def resize(parameter: Parameter) -> Sequence[Parameter] | None:
            if (parameter.group, parameter.name) not in names or parameter.tensor.info.shape[0] == self.size:
                return None
            old = parameter.tensor.info.shape[0]
            new, states = self._resize(parameter, rule, unread)
            changes.append(Change(parameter.group, f"{parameter.name}: {old} to {self.size} rows"))
            if self.size > old:
                reconstructed.append(f"rows {old} to {self.size - 1} of {parameter.name}")
            return [replace(parameter, tensor=new, states=states)]

        resized = map_parameters(catalog, resize, keep_name)
        refused = replace(resized, unread=(*catalog.unread, *unread))
        if catalog.config and not any("vocab_size" in part for part in iterate_parts(catalog.config)):
            changes.append(Change("model", "config.json has no vocab_size, and stays as it is"))
        return replace(refused, rows=self.size).with_changes(changes, reconstructed).with_config(self._change_config)

    def _find_names(self, catalog: Catalog) -> set[tuple[str, str]]:
        """Return all tensors with a row for each token by group and name: also tensors of averages of the model."""
        sizes = {(p.group, p.name): p.tensor.info.shape[:1] for p in catalog.parameters()}
        stored = {(group, alias): (group, name) for group, tied in catalog.tied.items() for alias, name in tied.items()}
        named = {key: key for key in sizes} | {alias: key for alias, key in stored.items() if key in sizes}
        if self.tensors:
            keys = {key for (_, name), key in named.items() if any(fnmatchcase(name, p) for p in self.tensors)}
            unused = [p for p in self.tensors if not any(fnmatchcase(name, p) for _, name in named)]
            if unused:
                raise InvalidArgumentError(f"resize-vocab: {catalog.label} has no tensor {unused[0]!r}")
        else:
            embeddings = {key for (_, name), key in named.items() if _ends_with(name, _EMBEDDINGS)}
            rows = {sizes[key] for key in embeddings}
            heads = {key for (_, name), key in named.items() if _ends_with(name, _HEADS)}
            keys = embeddings | heads if rows else embeddings
        self._check_names(catalog, {key: sizes[key] for key in keys})
        return keys

    def _check_names(self, catalog: Catalog, sizes: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
        if not sizes:
            raise InvalidArgumentError(
                f"resize-vocab: no embedding was found by its name in {catalog.label}: pass tensors= with its name"
            )
        if () in sizes.values() or len({*sizes.values()}) > 1:
            rows = ((name, size[0] if size else "no") for (_, name), size in sorted(sizes.items()))
            listed = ", ".join(f"{name} has {count} rows" for name, count in rows)
            raise InvalidArgumentError(f"resize-vocab: {listed}: pass tensors= with what has a row for each token")

    def _resize(
        self, parameter: Parameter, rule: RowRule, unread: list[UnreadTensorNote]
    ) -> tuple[EditedTensor, dict[tuple[str, str], EditedTensor]]:
        """Return the parameter and its states with other rows. States without a rule are added to ``unread``."""
        name, master = parameter.name, parameter.master
        states: dict[tuple[str, str], EditedTensor] = {}
        for (group, state), tensor in parameter.states.items():
            is_master = state in MASTERS and tensor.info.shape == parameter.tensor.info.shape
            if is_master:
                states[group, state] = self._with_rows(tensor, rule, f"{name}/{state}")
            elif resized_state := self._resize_state(parameter, state, tensor):
                states[group, state] = resized_state
            else:
                why = (
                    f"is {describe_size(tensor.info)}, and its parameter {describe_size(parameter.tensor.info)}: no "
                    "rule says what its new rows are. Edit or load the model alone"
                )
                unread.append(UnreadTensorNote(group, state_key(name, state), why))
        if master is None:
            return self._with_rows(parameter.tensor, rule, name), states
        resized = self._with_rows(master, rule, name)
        old = min(parameter.tensor.info.shape[0], self.size)
        new_rows = cast(resized, parameter.tensor.info.dtype)
        parts = [RowRange(parameter.tensor, 0, old), RowRange(new_rows, old, self.size - old)]
        return join_rows(parts, parameter.tensor.info), states

    def _with_rows(self, tensor: EditedTensor, rule: RowRule | None, name: str) -> EditedTensor:
        """Return a tensor with the rows that remain, and new ones by the rule; zeros without one."""
        old = tensor.info.shape[0]
        kept = RowRange(tensor, 0, min(old, self.size))
        count = max(0, self.size - old)
        if not count:
            return join_rows([kept], tensor.info)
        new = Zeros(with_rows(tensor.info, count)) if rule is None else rule.fill(tensor, name, count)
        return join_rows([kept, RowRange(new, 0, count)], tensor.info)

    def _resize_state(self, parameter: Parameter, state: str, tensor: EditedTensor) -> EditedTensor | None:
        """Return a state that is not the parameter itself: moments, factors of moments, or one value. Others: none."""
        shape, whole = tensor.info.shape, parameter.tensor.info.shape
        is_of_columns = len(whole) > 1 and shape in {whole[1:], (1, *whole[1:])} and shape != whole
        if len(shape) == 1 and whole == (*shape, *shape):  # a factor of rows or of columns: only its name tells
            is_of_columns = "col" in state
            if is_of_columns == ("row" in state):
                return None
        if is_one_value(state, tensor, parameter.tensor) or is_of_columns:
            return tensor
        if shape == whole or shape == whole[:1] or (shape[:1] == whole[:1] and all(size == 1 for size in shape[1:])):
            return self._with_rows(tensor, None, f"{parameter.name}/{state}")
        return None

    def _change_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Name the new size wherever the configuration has one for the tokens of text.

        Raises ``InvalidArgumentError`` if a token that it names would have no row any more.
        """
        return change_parts(config, self._change_part)

    def _change_part(self, part: dict[str, Any]) -> dict[str, Any]:
        if "vocab_size" not in part:
            return part
        old = part["vocab_size"]
        for key, value in part.items():
            tokens = value if isinstance(value, list) else [value]
            if key in _TOKENS and any(
                type(token) is int and self.size <= token and (type(old) is not int or token < old) for token in tokens
            ):
                raise InvalidArgumentError(
                    f"resize-vocab: config.json has {key} {value}, and {self.size} rows end before that: correct it "
                    "first, or keep more rows"
                )
        return {**part, "vocab_size": self.size}


def _ends_with(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
