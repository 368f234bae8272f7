"""Options of a checkpoint in NxD's format: the number of ranks of each kind, and how they divide the model.

:mod:`rankless.nxd.writer.nxd_target` makes them from the arguments of ``convert``, on each rank, and checks them on
rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankless.errors import InvalidArgumentError
from rankless.nxd.reader import sharding_rules
from rankless.nxd.reader.sharding_spec import ShardingRule, ShardingSpec

_PLAIN = ShardingSpec((ShardingRule("*"),))


@dataclass(frozen=True)
class NxdOptions:
    """The parallelism of the output. With ``dp_size`` the optimizer is a ZeRO-1 optimizer of that many ranks.

    ``layout`` is the same as for reading; ``xser`` writes a file for each tensor; ``master_weights`` adds the model's
    tensors in 32 bits to the ZeRO-1 state.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int | None = None
    xser: bool = True
    master_weights: bool = False
    layout: str | None = None

    def check_values(self) -> None:
        """Raise ``InvalidArgumentError`` for invalid options."""
        if min(self.tp_size, self.pp_size, 1 if self.dp_size is None else self.dp_size) < 1:
            raise InvalidArgumentError("tp_size, pp_size and dp_size must be at least 1")
        if self.master_weights and self.dp_size is None:
            raise InvalidArgumentError("master_weights are part of a ZeRO-1 state: pass dp_size, too")
        if (self.tp_size > 1 or self.pp_size > 1) and self.layout is None:
            raise InvalidArgumentError(
                f"{self.tp_size} tensor-parallel ranks and {self.pp_size} stages need a layout, which says how they "
                f"divide the model: {', '.join(sharding_rules.BUILT_IN)}, or a spec file"
            )

    @property
    def sharding_spec(self) -> ShardingSpec:
        """The sharding spec of the layout."""
        return _PLAIN if self.layout is None else sharding_rules.load_spec(self.layout)
