"""The verb ``upcycle``: each dense MLP becomes equal experts and a router, with the states of the MLP.

Experts get the names of the library that goes on: see :class:`Upcycle`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from rankless.edits.catalog import Catalog, Change, Parameter, is_one_value, map_parameters
from rankless.edits.config_parts import text_parts
from rankless.edits.formulas import NormalRows, RowRange, Rows, Zeros
from rankless.edits.freeze import add_trained
from rankless.edits.row_rules import RowRule, parse_rule
from rankless.errors import InvalidArgumentError
from rankless.formats.edited_reader import EditedTensor
from rankless.ondisk.data_files import TensorInfo

#: The most experts of a layer after an edit.
_MOST_EXPERTS = 4096

#: The projections of a gated MLP, in the names of transformers.
_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"


class _Style(NamedTuple):
    """The names that experts get: of the module with them, of its router, and of the projections, if they change."""

    module: str
    router: str
    projections: Mapping[str, str] = {}


#: The names of each style, in place of the module ``mlp``.
_STYLES = {
    "experts": _Style("mlp.experts", "mlp.router.weight"),
    "fused": _Style("mlp.experts", "mlp.gate.weight"),
    "qwen3-moe": _Style("mlp.experts", "mlp.gate.weight"),
    "mixtral": _Style(
        "block_sparse_moe.experts", "block_sparse_moe.gate.weight", {_GATE: "w1", _DOWN: "w2", _UP: "w3"}
    ),
}


class Upcycle(msgspec.Struct, frozen=True, tag_field="verb", tag="upcycle", forbid_unknown_fields=True):
    """Make experts of each dense MLP. All begin as the MLP with its moments; the router is new.

    Args:
        experts: How many experts each MLP becomes.
        per_token: How many experts a token goes to, for ``config.json``.
        style: The names of experts: ``experts`` (``mlp.experts.0.up_proj``, router ``mlp.router``), ``mixtral`` or
            ``qwen3-moe`` (as their folders on the Hub have them), ``fused`` (all experts in one tensor, as the modules
            of transformers 5 have them).
        router: The rule for the router: ``zeros`` or ``normal:STD``.
        mlp: The name of the modules that become experts.
        seed: The seed of ``normal``.
    """

    experts: int
    per_token: int = 2
    style: str = "experts"
    router: str = "normal:0.02"
    mlp: str = "mlp"
    seed: int = 0

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog with experts. Raises ``InvalidArgumentError``."""
        catalog.check_no_adapters("upcycle")
        rule = self._check()
        mlps = self._find_mlps(catalog)
        names = _Names(self, _STYLES[self.style])
        changes: list[Change] = []

        def change(parameter: Parameter) -> Sequence[Parameter] | None:
            if names.split(parameter.name) is None:
                return None
            if self.style != "fused":
                return [replace(parameter, name=name) for name in names.rename(parameter.name)]
            return _fuse(parameter, mlps, names, self.experts)

        upcycled = map_parameters(catalog, change, names.rename)
        for group, prefixes in _groups_of(mlps).items():
            changes += [Change(group, f"{prefix}{self.mlp}: {self.experts} experts") for prefix in prefixes]
        with_routers = self._add_routers(upcycled.with_changes(changes), mlps, names, rule)
        return with_routers.with_config(self._change_config)

    def _check(self) -> RowRule:
        if not 1 < self.experts <= _MOST_EXPERTS or not 0 < self.per_token <= self.experts:
            raise InvalidArgumentError(
                f"upcycle: experts must be 2 to {_MOST_EXPERTS}, and per_token 1 to experts; got {self.experts} and "
                f"{self.per_token}"
            )
        if self.style not in _STYLES:
            raise InvalidArgumentError(f"upcycle: style must be one of {', '.join(_STYLES)}; got {self.style!r}")
        rule = parse_rule(self.router, self.seed)
        if rule.kind not in {"zeros", "normal"}:
            raise InvalidArgumentError(f"upcycle: router must be zeros or normal:STD; got {self.router!r}")
        return rule

    def _find_mlps(self, catalog: Catalog) -> dict[tuple[str, str], dict[str, Parameter]]:
        """Return the tensors of each dense MLP, by the rest of their names after it; MLPs by group and prefix."""
        names = _Names(self, _STYLES[self.style])
        mlps: dict[tuple[str, str], dict[str, Parameter]] = {}
        for parameter in catalog.parameters():
            if parts := names.split(parameter.name):
                mlps.setdefault((parameter.group, parts[0]), {})[parts[1]] = parameter
        if not mlps:
            raise InvalidArgumentError(f"upcycle: {catalog.label} has no module {self.mlp!r}: pass mlp= with its name")
        for (_, prefix), tensors in mlps.items():
            if any(name.startswith("experts.") for name in tensors):
                raise InvalidArgumentError(f"upcycle: {prefix}{self.mlp} of {catalog.label} has experts already")
            expected = {f"{name}.weight" for name in (_GATE, _UP, _DOWN)}
            if self.style != "experts" and tensors.keys() != expected:
                raise InvalidArgumentError(
                    f"upcycle: {prefix}{self.mlp} has {', '.join(sorted(tensors))}, and style={self.style!r} needs "
                    f"{', '.join(sorted(expected))}: use style='experts'"
                )
            if not any(len(parameter.tensor.info.shape) > 1 for parameter in tensors.values()):
                raise InvalidArgumentError(f"upcycle: {prefix}{self.mlp} of {catalog.label} has no weight of a layer")
        return mlps

    def _add_routers(
        self, catalog: Catalog, mlps: Mapping[tuple[str, str], Mapping[str, Parameter]], names: _Names, rule: RowRule
    ) -> Catalog:
        """Return the catalog with a router for each MLP, and its states."""
        tensors = {group: dict(by_name) for group, by_name in catalog.tensors.items()}
        siblings: dict[str, list[tuple[str, str]]] = {}
        for (group, prefix), parts in mlps.items():
            first = _first_projection(parts)
            router = names.router(prefix)
            info = TensorInfo(first.tensor.info.dtype, (self.experts, _hidden_size(catalog.config, parts)))
            is_zero = rule.kind == "zeros"
            tensors[group][router] = Zeros(info) if is_zero else NormalRows(info, router, rule.std, rule.seed)
            siblings.setdefault(group, []).append((router, names.rename(first.name)[0]))
        sorted_tensors = {group: dict(sorted(by_name.items())) for group, by_name in tensors.items()}
        added = replace(catalog, tensors=sorted_tensors)
        trained = {(parameter.group, parameter.name): parameter for parameter in added.parameters()}
        for group, pairs in siblings.items():
            added = add_trained(added, {router: trained[group, sibling] for router, sibling in pairs}, "upcycle")
        return added.with_changes([], [router for pairs in siblings.values() for router, _ in pairs])

    def _change_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of the new architecture. Raises ``InvalidArgumentError`` for parts of a model."""
        if self.style in {"mixtral", "qwen3-moe"} and (parts := text_parts(config)):
            raise InvalidArgumentError(
                f"upcycle: style={self.style!r} makes a whole model of this architecture, and config.json describes "
                f"several parts ({', '.join(parts)}): use style='experts', and change config.json yourself"
            )
        if self.style == "mixtral":
            changed = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
            return {**config, **changed, "num_local_experts": self.experts, "num_experts_per_tok": self.per_token}
        if self.style == "qwen3-moe":
            moe: dict[str, Any] = {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "decoder_sparse_step": 1,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
            }
            if "intermediate_size" in config:
                moe["moe_intermediate_size"] = config["intermediate_size"]
            return {**config, **moe, "num_experts": self.experts, "num_experts_per_tok": self.per_token}
        return config


class _Names:
    """The names of experts and routers, given the names of the dense MLPs."""

    def __init__(self, verb: Upcycle, style: _Style) -> None:
        self._pattern = re.compile(rf"((?:.*\.)?){re.escape(verb.mlp)}\.(.+)")
        self._verb, self._style = verb, style

    def split(self, name: str) -> tuple[str, str] | None:
        """Return the parts of a name before and after the MLP, or ``None`` if it is of no MLP.

        For example, ``layers.0.mlp.up_proj.weight`` gives ``layers.0.`` and ``up_proj.weight``.
        """
        match = self._pattern.fullmatch(name)
        return (match[1], match[2]) if match else None

    def rename(self, name: str) -> Sequence[str]:
        """Return the new names of a parameter: one for each expert, or one of all. Others keep theirs.

        For example, ``mlp.up_proj.weight`` becomes ``mlp.experts.0.up_proj.weight`` and so on.
        """
        parts = self.split(name)
        if parts is None:
            return (name,)
        prefix, rest = parts
        if self._verb.style == "fused":
            projection = rest.partition(".")[0]
            return () if projection == _UP else (prefix + self.fused(projection),)
        projection, dot, end = rest.partition(".")
        renamed = self._style.projections.get(projection, projection)
        return [f"{prefix}{self._style.module}.{n}.{renamed}{dot}{end}" for n in range(self._verb.experts)]

    def fused(self, projection: str) -> str:
        """Return the name of the tensor with a projection of all experts, after the prefix.

        For example, ``mlp.experts.gate_up_proj`` for ``up_proj``.
        """
        return f"{self._style.module}.{'down_proj' if projection == _DOWN else 'gate_up_proj'}"

    def router(self, prefix: str) -> str:
        """Return the name of a router."""
        return prefix + self._style.router


def _fuse(
    parameter: Parameter, mlps: Mapping[tuple[str, str], Mapping[str, Parameter]], names: _Names, experts: int
) -> Sequence[Parameter]:
    """Return the tensor of all experts that begins with a projection; none for the one that is joined to another."""
    parts = names.split(parameter.name)
    if parts is None or parts[1].startswith(f"{_UP}."):
        return []
    prefix, rest = parts
    joined = [parameter]
    if rest.startswith(f"{_GATE}."):
        joined.append(mlps[parameter.group, prefix][f"{_UP}.weight"])
    states = {
        key: state
        if is_one_value(key[1], state, parameter.tensor)
        else _stack([p.states[key] for p in joined], experts)
        for key, state in parameter.states.items()
    }
    name = prefix + names.fused(rest.partition(".")[0])
    return [replace(parameter, name=name, tensor=_stack([p.tensor for p in joined], experts), states=states)]


def _stack(tensors: Sequence[EditedTensor], experts: int) -> EditedTensor:
    """Return a tensor that has, for each expert, the rows of all tensors one after another."""
    shapes = {tensor.info.shape[1:] for tensor in tensors}
    if len(shapes) > 1:
        raise InvalidArgumentError(f"upcycle: projections of one MLP have rows of the shapes {sorted(shapes)}")
    rows = sum(tensor.info.shape[0] for tensor in tensors)
    info = TensorInfo(tensors[0].info.dtype, (rows, *shapes.pop()))
    parts = tuple(RowRange(tensor, 0, tensor.info.shape[0]) for tensor in tensors)
    flat = Rows(TensorInfo(info.dtype, (experts * rows, *info.shape[1:])), parts * experts)
    return replace(flat, info=TensorInfo(info.dtype, (experts, *info.shape)))


def _first_projection(parts: Mapping[str, Parameter]) -> Parameter:
    """Return a tensor of an MLP that has a column for each hidden unit: the gate, or the first by its name."""
    wide = [name for name, parameter in sorted(parts.items()) if len(parameter.tensor.info.shape) > 1]
    return parts[next((name for name in wide if name.startswith((_GATE, _UP))), wide[0])]


def _hidden_size(config: Mapping[str, Any], parts: Mapping[str, Parameter]) -> int:
    """Return the size of an MLP's input: the columns of gate or up, or the size in the configuration.

    Without both it is the smaller size of its projections.
    """
    first = _first_projection(parts)
    if first.name.rpartition(".")[0].endswith((_GATE, _UP)):
        return first.tensor.info.shape[1]
    text = config.get("text_config")
    tables = [config, text] if isinstance(text, dict) else [config]
    named = [table[key] for table in tables for key in ("hidden_size", "n_embd", "d_model") if key in table]
    sizes = [size for size in named if isinstance(size, int) and not isinstance(size, bool) and size > 0]
    shapes = [parameter.tensor.info.shape for parameter in parts.values()]
    wide = {size for shape in shapes if len(shape) > 1 for size in shape}
    return sizes[0] if sizes and sizes[0] in wide else min(wide)


def _groups_of(mlps: Mapping[tuple[str, str], object]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for group, prefix in mlps:
        groups.setdefault(group, []).append(prefix)
    return groups
