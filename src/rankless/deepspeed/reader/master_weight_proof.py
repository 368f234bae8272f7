"""Proof that master weights are at the right place: rounded, they are the weights that the model computes with.

DeepSpeed copies the master weights to the model after each step. So a wrong order of parameters, wrong padding or files
of two saves show as a difference.

:mod:`rankless.deepspeed.reader.tag_contents` collects on each rank, and
:class:`~rankless.deepspeed.reader.deepspeed_reader.DeepSpeedReader` compares when files are checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.read_stored_tensor import digest_tensor, read_tensor_bytes
from rankless.formats.stored_tensor import StoredTensor
from rankless.ondisk.dtypes import dtype_width

if TYPE_CHECKING:
    import numpy as np

#: The elements that are read at a time.
_ELEMENTS = 2**20

#: The dtype of master weights, and those that they are rounded to.
_MASTER, _BFLOAT16, _FLOAT16 = "F32", "BF16", "F16"


@dataclass
class Evidence:
    """Tensors to compare, which are collected while a checkpoint is opened. Comparing them means reading them.

    Attributes:
        masters: Master weights and the weights of the model, by parameter.
        replicas: Tensors that all ranks should have alike, each with a label.
    """

    masters: dict[str, tuple[StoredTensor, StoredTensor]] = field(default_factory=dict)
    replicas: list[tuple[str, Sequence[StoredTensor]]] = field(default_factory=list)

    def add_masters(self, masters: Mapping[str, StoredTensor], copies: Mapping[str, StoredTensor]) -> None:
        """Add the master weights of the parameters that the model has, too."""
        self.masters |= {name: (masters[name], copy) for name, copy in copies.items() if name in masters}

    def require_consistent(self, source: str) -> None:
        """Raise ``CorruptCheckpointError`` naming the first tensor that is inconsistent."""
        for name, (master, weight) in self.masters.items():
            if not have_equal_values(master, weight):
                raise CorruptCheckpointError(
                    f"{source}: the master weights of {name!r:.100}, rounded, are not the weights of the model: the "
                    "files are from two saves, or the weights were changed after the last step. To read the model's "
                    "weights without an optimizer: --key weights=model --key optimizer=skip"
                )
        for subject, tensors in self.replicas:
            first = digest_tensor(tensors[0])
            if any(digest_tensor(other) != first for other in tensors[1:]):
                raise CorruptCheckpointError(
                    f"{source}: the {subject} differs between ranks or stages: the files are from two saves"
                )


def have_equal_values(master: StoredTensor, weight: StoredTensor) -> bool:
    """Return whether master weights, rounded to the dtype of the model's weights, are these."""
    if master.info.shape != weight.info.shape:
        return False
    widths = [dtype_width(tensor.info.dtype) for tensor in (master, weight)]
    elements = weight.info.nbytes // widths[1]
    return all(
        _have_equal_range(master, weight, start, min(start + _ELEMENTS, elements))
        for start in range(0, elements, _ELEMENTS)
    )


def _have_equal_range(master: StoredTensor, weight: StoredTensor, start: int, stop: int) -> bool:
    raws = []
    for tensor in (master, weight):
        width = dtype_width(tensor.info.dtype)
        raws.append(read_tensor_bytes(tensor, start * width, stop * width))
    return round_values(raws[0], master.info.dtype, weight.info.dtype) == round_values(
        raws[1], weight.info.dtype, weight.info.dtype
    )


def round_values(raw: bytes, dtype: str, target: str) -> bytes:
    """Return the values rounded from fp32 to ``target``, to the nearest ones; values of other dtypes as they are.

    All NaNs of 16 bits become equal, because which one a NaN is rounded to depends on the machine.
    """
    if target not in {_BFLOAT16, _FLOAT16}:
        return raw
    import numpy as np  # noqa: PLC0415 - importing NumPy is slow, and showing a file does not need it

    if dtype == _MASTER:
        bits = _round_to_bfloat16(np.frombuffer(raw, "<u4")) if target == _BFLOAT16 else _round_to_float16(raw)
    elif dtype == target:
        bits = np.frombuffer(raw, "<u2")
    else:
        return raw
    infinity = 0x7F80 if target == _BFLOAT16 else 0x7C00
    return bytes(np.where((bits & 0x7FFF) > infinity, np.uint16(0x7FFF), bits).astype("<u2").tobytes())


def _round_to_bfloat16(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to the nearest, in a tie to the even one."""
    import numpy as np  # noqa: PLC0415 - importing NumPy is slow, and showing a file does not need it

    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000  # noqa: PLR2004 - the bits of infinity
    return np.where(is_nan, 0x7FFF, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _round_to_float16(raw: bytes) -> np.ndarray[Any, Any]:
    import numpy as np  # noqa: PLC0415 - importing NumPy is slow, and showing a file does not need it

    with np.errstate(over="ignore"):
        return np.frombuffer(raw, "<f4").astype("<f2").view("<u2")
