"""The verb ``cast``: the dtype of floating-point tensors of the model; states of optimizers keep theirs."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec
from msgspec.structs import replace

from rankless.edits import formulas
from rankless.edits.catalog import Catalog, Change, Parameter, keep_name, map_parameters
from rankless.edits.config_parts import set_dtype
from rankless.errors import InvalidArgumentError
from rankless.ondisk.dtypes import BY_TORCH_NAME, TORCH_NAMES, UNSCALED_FLOATS


class Cast(msgspec.Struct, frozen=True, tag_field="verb", tag="cast", forbid_unknown_fields=True):
    """Cast parameters and buffers, as torch rounds them. Integers and quantized tensors stay.

    Args:
        dtype: The name in torch, such as ``bfloat16``.
        include: Shell patterns of the names; all by default.
    """

    dtype: str
    include: list[str] = msgspec.field(default_factory=lambda: ["*"])

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog with another dtype. Raises ``InvalidArgumentError``."""
        dtype = parse_dtype(self.dtype)
        for pattern in self.include:
            if not any(fnmatchcase(name, pattern) for name in catalog.names()):
                raise InvalidArgumentError(f"cast: {catalog.label} has no parameter {pattern!r}")
        changes: list[Change] = []

        def cast(parameter: Parameter) -> Sequence[Parameter] | None:
            old = parameter.tensor.info.dtype
            is_wanted = any(fnmatchcase(parameter.name, pattern) for pattern in self.include)
            if not is_wanted or old not in UNSCALED_FLOATS or old == dtype:
                return None
            changes.append(Change(parameter.group, f"{parameter.name}: {old} to {dtype}"))
            return [replace(parameter, tensor=formulas.cast(parameter.tensor, dtype))]

        cast_all = map_parameters(catalog, cast, keep_name).with_changes(changes)
        return cast_all.with_config(lambda config: set_dtype(config, dtype)) if self.include == ["*"] else cast_all


def parse_dtype(name: str) -> str:
    """Return the name in files of a dtype that elements can be cast to. Raises ``InvalidArgumentError``.

    For example, ``"BF16"`` for ``bfloat16``.
    """
    dtype = BY_TORCH_NAME.get(name)
    if dtype not in UNSCALED_FLOATS:
        names = ", ".join(sorted(TORCH_NAMES[known] for known in UNSCALED_FLOATS))
        raise InvalidArgumentError(f"dtype must be one of {names}; got {name!r}")
    return dtype
