"""Modes of torch: noted copies into memory happen before anything else uses that memory.

Most uses are operations that torch dispatches: one mode looks at each of them. Another mode knows the calls that torch
does not dispatch: methods that give memory away, as ``numpy()`` does, and operations of other libraries that are one
function for all kinds of tensors. (vLLM packs weights for oneDNN by such an operation: it packed memory that was not
loaded yet.)

:class:`~rankless.inference.open_weights.ModelWeights` enters them on each rank, in the thread of the caller, as long as
its block runs. No use of memory may come before the copies into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from rankless.errors import StateError
from rankless.inference.lazy_tensor import (
    LazyTensor,
    Loader,
    Operation,
    is_composed,
    is_unread,
    is_view,
    iterate_written,
    realize,
)

#: The methods of a tensor that use its elements, or give its memory away, without an operation.
_ACCESSES = frozenset(
    {
        "numpy",
        "__array__",
        "tolist",
        "data_ptr",
        "untyped_storage",
        "storage",
        "__reduce_ex__",
        "__deepcopy__",
        "__dlpack__",
        "__repr__",
        "__format__",
    }
)

#: Those after which memory may be changed without torch.
_GIVEN_AWAY = frozenset({"numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"})


class FillingLoader(Loader, Protocol):
    """A loader that executes copies when it is asked to: a ``WeightsLoader``."""

    def fill_before_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Execute the copies into the memory of tensors that are about to be used.

        The modes call it before each operation, in the thread of the caller.
        """

    def note_written(self, tensor: torch.Tensor) -> None:
        """Note that an operation writes into a tensor."""

    def fill_at_once(self, tensor: torch.Tensor) -> None:
        """From now on execute copies into the memory of a tensor when they are made."""


@contextmanager
def copies_first(loader: FillingLoader) -> Iterator[None]:
    """Let copies of a loader happen before other uses of the memory that they fill, inside the ``with`` block."""
    mode = _CopiesBeforeOperations(loader)
    with ExitStack() as stack:
        stack.callback(_leave_ended_modes)
        stack.enter_context(_CopiesBeforeAccess(loader))
        stack.enter_context(mode)
        try:
            yield
        finally:
            if _top_mode() is not mode:
                mode.left = stack.pop_all()  # torch can only leave the mode that was entered last
                raise StateError(
                    "another block with a mode of torch, such as open_weights(), was entered after this one, and is "
                    "still open: leave blocks in the reverse order"
                )


def _leave_ended_modes() -> None:
    """Leave the modes of blocks that ended while the mode of the block that ends now was on top of them."""
    while isinstance(top := _top_mode(), _CopiesBeforeOperations) and top.left is not None:
        top.left.close()


def _top_mode() -> object:
    """Return the mode that was entered last."""
    modes = _get_current_dispatch_mode_stack()
    return modes[-1] if modes else None


class _CopiesBeforeOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, loader: FillingLoader) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._loader = loader
        #: The way out of this mode, if its block ended while another mode was on top of it.
        self.left: ExitStack | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return ``False``: torch would import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Operation, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`TorchDispatchMode`. A view uses nothing."""
        kwargs = kwargs or {}
        if any(map(_has_lists_of_lazy, args)):  # torch looks for tensors of other kinds in plain lists only
            return LazyTensor.__torch_dispatch__(func, types, args, kwargs)
        if is_composed(func):
            with self:
                return func.decompose(*args, **kwargs)
        if not is_view(func) and not self._is_noted(func, args):
            self._loader.fill_before_use(_iterate_real([*args, *kwargs.values()]))
            for tensor in filter(_is_real, iterate_written(func, args, kwargs)):
                self._loader.note_written(tensor)
        return func(*args, **kwargs)

    def _is_noted(self, func: Operation, args: Any) -> bool:
        """Return whether an operation is a copy that this loader notes."""
        is_copy = func is torch.ops.aten.copy_.default and is_unread(args[1])
        return is_copy and args[1].content.loader is self._loader


class _CopiesBeforeAccess(TorchFunctionMode):
    def __init__(self, loader: FillingLoader) -> None:
        super().__init__()
        self._loader = loader

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`TorchFunctionMode`."""
        del types
        name, tensor = getattr(func, "__name__", ""), (args or [None])[0]
        if name == "__set__" and len(args) > 1 and isinstance(args[1], LazyTensor):
            # `parameter.data = lazy`: the parameter would have no memory.
            return func(tensor, args[1].content.loader.read_view(args[1], "data.__set__"))
        if _is_of_library(func):
            self._loader.fill_before_use(_iterate_real([*args, *(kwargs or {}).values()]))
            return func(*realize(args, func), **realize(kwargs or {}, func))
        if name in _ACCESSES and _is_real(tensor):
            self._loader.fill_before_use([tensor])
            if name in _GIVEN_AWAY:
                self._loader.fill_at_once(tensor)
        return func(*args, **(kwargs or {}))


def _is_of_library(func: Any) -> bool:
    """Return whether a function is an operation that another library has registered with torch."""
    if isinstance(func, torch._ops.OpOverload):  # noqa: SLF001
        return bool(func.namespace != "aten")
    return isinstance(func, torch._ops.OpOverloadPacket) and not str(func).startswith("aten.")  # noqa: SLF001


def _is_real(value: Any) -> bool:
    """Return whether a value is a tensor with memory."""
    return isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor) and not value.is_meta


def _has_lists_of_lazy(value: Any) -> bool:
    """Return whether a value is a list of lists with a lazy tensor, as ``scatter`` takes them."""
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(item, LazyTensor) for part in value if isinstance(part, list | tuple) for item in part)


def _iterate_real(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _iterate_real(value)
        elif _is_real(value):
            yield value
