"""The tensors that a rank has, in a save, or requests, in a load: their spec does not depend on the rank.

A capture and a restore fill an :class:`Inventory` on every rank, in the thread of the caller. Ranks exchange the specs
in a vote, so equal objects must give equal specs: the order of the tensors and all names follow from the objects alone.
"""

from __future__ import annotations

from rankless.engine.plan.layout_types import MeshShape, PlacementLayout
from rankless.engine.plan.split_tensors import Splits
from rankless.engine.plan.tensor_specs import LayoutSpec, Meshes, NamedPieces, Spec, TensorSpec
from rankless.state.tensor_views import TensorView

#: Groups of tensors; their directories or files have the same names.
MODEL, OPTIMIZER = "model", "optimizer"


class Inventory:
    """Tensors that a rank has or requests, with a spec of them that does not depend on the rank."""

    def __init__(self) -> None:
        self._meshes: dict[MeshShape, int] = {}
        self._layouts: dict[LayoutSpec, int] = {}
        self._tensors: list[TensorSpec] = []
        self._pieces: list[NamedPieces] = []
        self.tied: dict[str, dict[str, str]] = {}
        self.names: dict[str, list[str]] = {}

    def add_tensor(
        self,
        group: str,
        name: str,
        tensor: TensorView,
        *,
        dtype: str | None = None,
        shared: bool = True,
        splits: Splits = (),
        apart: bool = False,
    ) -> None:
        """Add one tensor. ``dtype`` is its dtype in the checkpoint if that differs."""
        layout = None if tensor.layout is None else self._layout_index(tensor.layout)
        self._tensors.append(
            TensorSpec(group, name, dtype or tensor.dtype, tensor.shape, layout, shared, splits, apart)
        )
        if tensor.pieces is not None:
            self._pieces.append(NamedPieces(group, name, tensor.pieces))

    def _layout_index(self, layout: PlacementLayout) -> int:
        mesh = self._meshes.setdefault(layout.mesh, len(self._meshes))
        return self._layouts.setdefault(LayoutSpec(mesh, layout.placements), len(self._layouts))

    def build_spec(self) -> Spec:
        """Return the spec of the tensors."""
        return Spec(tuple(self._layouts), tuple(self._tensors), self.tied, self.names)

    def build_meshes(self) -> Meshes:
        """Return the meshes that the spec refers to by number, and the pieces that this rank holds of some tensors."""
        return Meshes(tuple(self._meshes), tuple(self._pieces))
