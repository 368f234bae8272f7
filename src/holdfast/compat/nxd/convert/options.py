"""What a checkpoint of NxD is to be like: how many ranks of each kind, and how they divide the model."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.compat.nxd.format import sharding_rules
from holdfast.compat.nxd.format.sharding_spec import ShardingRule, ShardingSpec
from holdfast.errors import InvalidArgumentError

_PLAIN = ShardingSpec((ShardingRule("*"),))


@dataclass(frozen=True)
class NxdOptions:
    """What NxD's ranks are to be. With ``dp_size`` the optimizer is a ZeRO-1 one of so many data-parallel ranks.

    ``layout`` as for reading; ``xser``: a file for each tensor; ``master_weights``: the model's tensors are in the
    ZeRO-1 state, too, in 32 bits.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int | None = None
    xser: bool = True
    master_weights: bool = False
    layout: str | None = None

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be."""
        if min(self.tp_size, self.pp_size, 1 if self.dp_size is None else self.dp_size) < 1:
            raise InvalidArgumentError("tp_size, pp_size and dp_size are numbers of ranks, at least 1")
        if self.master_weights and self.dp_size is None:
            raise InvalidArgumentError("master_weights are part of a ZeRO-1 state: say dp_size, too")
        if (self.tp_size > 1 or self.pp_size > 1) and self.layout is None:
            raise InvalidArgumentError(
                f"how {self.tp_size} tensor-parallel ranks and {self.pp_size} stages divide a model, a layout says: "
                f"{', '.join(sharding_rules.BUILT_IN)}, or a spec file"
            )

    @property
    def spec(self) -> ShardingSpec:
        """The layout."""
        return _PLAIN if self.layout is None else sharding_rules.rules_named(self.layout)
