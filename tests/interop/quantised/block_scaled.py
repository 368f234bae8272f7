"""A quantized tensor like those of packages: 8-bit codes, a scale for each block of elements, and a table for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class BlockScaled(torch.Tensor):
    """Blocks are of elements in row-major order. Slices of rows end at a block."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    block: object

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, block: Any, dtype: Any = torch.float32
    ) -> Self:
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        self.codes, self.scale, self.table, self.block = codes, scale, table, block
        return self

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self) -> str:
        return f"BlockScaled({list(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], {"block": self.block, "dtype": self.dtype, "shape": tuple(self.shape)}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> BlockScaled:
        return cls(*inner.values(), context["block"], context["dtype"])

    def convert(self, function: Callable[[torch.Tensor], torch.Tensor]) -> BlockScaled:
        return type(self)(function(self.codes), function(self.scale), function(self.table), self.block, self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {aten.detach.default, aten.clone.default, aten.alias.default}:
            return args[0].convert(func)
        if func is aten.view.default:
            return type(args[0])(
                args[0].codes.view(args[1]), args[0].scale, args[0].table, args[0].block, args[0].dtype
            )
        if func is aten.slice.Tensor:
            return args[0].slice_rows(*args[1:])
        raise NotImplementedError(f"{func} of {tree_map_only(torch.Tensor, type, args)}")

    def slice_rows(self, dim: int, start: int, stop: int) -> BlockScaled:
        width = self.codes[0].numel()
        if dim or start * width % self.block or stop * width % self.block:
            raise ValueError("not at a block")
        scale = self.scale[start * width // self.block : stop * width // self.block]
        return type(self)(self.codes[start:stop], scale, self.table.clone(), self.block, self.dtype)


class Unsliceable(BlockScaled):
    def slice_rows(self, dim: int, start: int, stop: int) -> BlockScaled:
        raise NotImplementedError("slice")


class Adapted(torch.Tensor):
    """A wrapper of another wrapper, as of weights with an input that is quantized, too."""

    weight: BlockScaled
    offset: torch.Tensor

    @staticmethod
    def __new__(cls, weight: BlockScaled, offset: torch.Tensor) -> Self:
        self = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)
        self.weight, self.offset = weight, offset
        return self

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self) -> str:
        return f"Adapted({self.weight})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["weight", "offset"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Adapted:
        return cls(inner["weight"], inner["offset"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].weight.detach(), args[0].offset.detach())
        raise NotImplementedError(func)


def make_scaled(rows: int, columns: int, block: Any = 4, *, seed: int | None = 0, kind: Any = BlockScaled) -> Any:
    """A tensor of some values, or without a ``seed`` of zeros."""
    generator = torch.Generator().manual_seed(seed or 0)
    zero = 0 if seed is None else 1
    numel = rows * columns
    return kind(
        torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8) * zero,
        torch.rand(numel // (block if isinstance(block, int) else 4), generator=generator) * zero,
        torch.rand(256, generator=generator) * zero,
        block,
    )


def inner_tensors(scaled: BlockScaled) -> list[torch.Tensor]:
    return [scaled.codes, scaled.scale, scaled.table]
