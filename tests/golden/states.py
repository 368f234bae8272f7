"""The states of the golden checkpoints. Formulas give their values, so that the expected contents are known.

Byte i of the tensor that a checkpoint calls ``group/name`` is ``crc32(group/name) + 37 i + i / 256``, modulo 256 (2 for
booleans). So there are NaNs of all kinds, infinities and denormals, and nothing is rounded.
"""

from __future__ import annotations

import collections
import datetime as dt
import math
import pathlib
import struct
import uuid
import zlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.golden.reader import WIDTHS, Tagged, Tensor

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in TORCH.items()}


def by_formula(key: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of a dtype and shape that a checkpoint has as ``key``: a group, a slash, a name."""
    place = zlib.crc32(key.encode())
    size = math.prod(shape) * WIDTHS[dtype]
    data = bytes((place + 37 * i + i // 256) % 256 for i in range(size))
    return Tensor(dtype, shape, bytes(byte % 2 for byte in data) if dtype == "BOOL" else data)


def as_torch(tensor: Tensor) -> torch.Tensor:
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=TORCH[tensor.dtype])
    return torch.frombuffer(bytearray(tensor.data), dtype=TORCH[tensor.dtype]).reshape(tensor.shape)


def seen(tensor: torch.Tensor) -> Tensor:
    """The bytes of a tensor of torch's."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return Tensor(NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().tobytes())


def value_of(name: str, dtype: str = "F32", shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """A tensor for values, which has no name that matters."""
    return as_torch(by_formula(name, dtype, shape))


def array_of(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return by_formula(name, dtype, shape).numpy().copy()


# ------------------------------------------------------------------------------------------------------------------
# Training objects whose states are formulas, not those of a version of torch


class Noted(nn.Module):
    """A module with a state beside its tensors, a tensor in it."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Net(nn.Module):
    """Tied weights, several dtypes, a scalar, an empty tensor, buffers, and a state beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 5, bias=False, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.noted = Noted()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, 3, dtype=torch.bool))


class Keeping:
    """A scheduler, a scaler, a data loader: whatever has a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


SETTINGS = {
    "lr": 0.05,
    "betas": (0.9, 0.999),
    "eps": 1e-08,
    "weight_decay": 0.1,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def adamw(module: nn.Module, group: str, *, filled: bool) -> torch.optim.Optimizer:
    """An AdamW of two groups, with the settings of the torch that made the golden ones."""
    named = dict(module.named_parameters())
    parts = list(named.values())
    optimizer = torch.optim.AdamW([{"params": parts[:2]}, {"params": parts[2:]}])
    if filled:
        for number, settings in enumerate(optimizer.param_groups):
            params = settings["params"]
            settings.clear()
            settings.update({"params": params, **SETTINGS, "lr": 0.05 / (1 + number)})
        for name, parameter in named.items():
            like = NAMES[parameter.dtype], tuple(parameter.shape)
            optimizer.state[parameter] = {
                "step": as_torch(by_formula(f"{group}/{name}/step", "F32", ())),
                "exp_avg": as_torch(by_formula(f"{group}/{name}/exp_avg", *like)),
                "exp_avg_sq": as_torch(by_formula(f"{group}/{name}/exp_avg_sq", *like)),
            }
    return optimizer


def fill(module: nn.Module, group: str) -> None:
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.copy_(as_torch(by_formula(f"{group}/{name}", NAMES[tensor.dtype], tuple(tensor.shape))))


def described(module: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes; of tied ones the first name."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors}


def moments(module: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    result: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, parameter in module.named_parameters():
        like = NAMES[parameter.dtype], tuple(parameter.shape)
        result |= {f"{name}/step": ("F32", ()), f"{name}/exp_avg": like, f"{name}/exp_avg_sq": like}
    return result


def groups_of(module: nn.Module) -> dict[str, Any]:
    """What ``state.json`` says of :func:`adamw`."""
    names = [name for name, _ in module.named_parameters()]
    return {
        "groups": [
            {
                "class": "AdamW",
                "number": n,
                "params": part,
                "settings": {**SETTINGS, "lr": 0.05 / (1 + n)},
                "state": {},
            }
            for n, part in enumerate([sorted(names[:2]), sorted(names[2:])])
        ]
    }


# ------------------------------------------------------------------------------------------------------------------
# The golden checkpoints


@dataclass(frozen=True)
class Golden:
    """What is saved, by the arguments of a save; and what the checkpoint holds, known without it.

    ``tensors`` are dtypes and shapes by group and name, of which the bytes are formulas. ``own`` are the values of each
    rank that saves. ``blank`` are objects to load into.
    """

    saved: dict[str, Any]
    blank: dict[str, Any]
    tensors: dict[str, dict[str, tuple[str, tuple[int, ...]]]]
    state: dict[str, Any]
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    own: tuple[dict[str, Any], ...] = ({},)
    options: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def expected(self) -> Iterator[tuple[str, str, Tensor]]:
        """Group, name and bytes of every tensor of a model or an optimizer."""
        for group, names in self.tensors.items():
            for name, (dtype, shape) in names.items():
                yield group, name, by_formula(f"{group}/{name}", dtype, shape)


def dtypes() -> Golden:
    """A plain state dict: every dtype, in three shapes; names of all kinds; and values that are no tensors."""
    shapes = {"table": (3, 5), "scalar": (), "empty": (2, 0, 3)}
    tensors = {f"{dtype}.{kind}": (dtype, shape) for dtype in TORCH for kind, shape in shapes.items()}
    names = ["ünïcødé ✓", "a/slash", "$dollar", '"quoted"\\', "zwölf\n"]
    tensors |= {name: ("U8", (n,)) for n, name in enumerate(names)}
    model = {name: as_torch(by_formula(f"model/{name}", *like)) for name, like in tensors.items()}
    notes = {"$tagged": {"$tuple": [1]}, "note": "text", "pair": (1, 2.5)}
    blank = {name: torch.zeros_like(tensor) for name, tensor in model.items()} | dict.fromkeys(notes)
    return Golden({"model": model | notes}, {"model": blank}, {"model": tensors}, {"model": notes})


def files() -> Golden:
    """A transformers-like model and its optimizer, both in several files with an index; tied weights."""
    model, blank = Net(), Net()
    fill(model, "model")
    model.noted.kept, blank.noted.kept = {"of": "it"}, {}
    config = SimpleNamespace(
        save_pretrained=None, to_json_string=lambda: '{\n  "architectures": [\n    "Net"\n  ]\n}\n'
    )
    model.config, blank.config = config, config
    return Golden(
        saved={"model": model, "optimizer": adamw(model, "optimizer", filled=True)},
        blank={"model": blank, "optimizer": adamw(blank, "optimizer", filled=False)},
        tensors={"model": described(model), "optimizer": moments(model)},
        state={"model": {"noted._extra_state": {"of": "it"}}, "optimizer": groups_of(model)},
        tied={"model": {"head.weight": "embed.weight"}},
        options={"max_shard_size": 200},
        others=(
            "model/config.json",
            "model/model.safetensors.index.json",
            "optimizer/optimizer.safetensors.index.json",
        ),
    )


def training() -> Golden:
    """All of a training run on three ranks, with every kind of value."""
    model, blank = Net(), Net()
    fill(model, "model")
    model.noted.kept = {"of": "it", "small": value_of("inline", "BF16", (2, 2)), "none": value_of("", "C64", (0, 2))}
    schedule = {"epoch": 3, "last": [0.05, 0.025], "warm": {1: 0.5, 2: 1.0}}
    scaler = {"scale": 65536.0, "found": value_of("scaler", "F32", ())}
    return Golden(
        saved={
            "model": model,
            "optimizer": adamw(model, "optimizer", filled=True),
            "scheduler": Keeping(schedule),
            "user_content": content(),
            "stateful": {"scaler": Keeping(scaler)},
        },
        blank={
            "model": blank,
            "optimizer": adamw(blank, "optimizer", filled=False),
            "scheduler": Keeping(),
            "stateful": {"scaler": Keeping()},
        },
        tensors={"model": described(model), "optimizer": moments(model)},
        state={
            "model": {"noted._extra_state": model.noted.kept},
            "optimizer": groups_of(model),
            "scheduler": {"class": "Keeping", "state": schedule},
            "stateful": {"scaler": scaler},
            "user_content": content(),
        },
        tied={"model": {"head.weight": "embed.weight"}},
        own=tuple(
            {
                "dataloader": {"at": 100 * rank},
                "content": {"rank": rank, "seen": value_of(f"rank {rank}", "I32", (rank,))},
            }
            for rank in range(3)
        ),
        options={"step": 3, "metrics": {"loss": 0.25, "broken": math.nan}},
    )


def slots() -> Golden:
    """Two models with an optimizer and a scheduler each; one of the optimizers trains a parameter of the other's."""
    generator, critic = nn.Linear(3, 2), nn.Linear(2, 1)
    blank_generator, blank_critic = nn.Linear(3, 2), nn.Linear(2, 1)
    fill(generator, "model/gen")
    fill(critic, "model/critic")
    groups = groups_of(generator)
    groups["groups"][1]["params"], groups["groups"][1]["settings"] = [], {**SETTINGS, "lr": 0.025}
    plain = {"state": {0: {"step": 7, "a/b%c": value_of("optimizer/critic/0/a%2Fb%25c", "F32", (2,))}}}
    plain["param_groups"] = [{"lr": 0.5, "params": [0]}]
    blank_plain = {"state": {0: {"step": 0, "a/b%c": torch.zeros(2)}}, "param_groups": [{"lr": 0.0, "params": [0]}]}
    return Golden(
        saved={
            "model": {"gen": generator, "critic": critic},
            "optimizer": {"gen": adamw(generator, "optimizer/gen", filled=True), "critic": plain},
            "scheduler": {"gen": Keeping({"epoch": 1}), "critic": Keeping({"epoch": 2})},
        },
        blank={
            "model": {"gen": blank_generator, "critic": blank_critic},
            "optimizer": {"gen": adamw(blank_generator, "optimizer/gen", filled=False), "critic": blank_plain},
            "scheduler": {"gen": Keeping(), "critic": Keeping()},
        },
        tensors={
            "model/gen": described(generator),
            "model/critic": described(critic),
            "optimizer/gen": moments(generator),
            "optimizer/critic": {"0/a%2Fb%25c": ("F32", (2,))},
        },
        state={
            "model/gen": {},
            "model/critic": {},
            "optimizer/gen": groups,
            "optimizer/critic": {
                "groups": [
                    {
                        "class": None,
                        "number": 0,
                        "params": ["0"],
                        "settings": {"lr": 0.5},
                        "state": {"0": {"step": 7}},
                    }
                ]
            },
            "scheduler/gen": {"class": "Keeping", "state": {"epoch": 1}},
            "scheduler/critic": {"class": "Keeping", "state": {"epoch": 2}},
        },
    )


def content() -> dict[str, Any]:
    """A value of every kind that a checkpoint keeps."""
    day = dt.datetime(2024, 10, 27, 2, 30, 0, 250, fold=1)  # noqa: DTZ001 - without a zone is a case
    east = dt.timezone(dt.timedelta(hours=5, minutes=30), "IST")
    return {
        "plain": {"null": None, "yes": True, "no": False, "text": "ünï ✓ \U0001f600", "": []},
        "integers": [0, -1, 2**53 + 1, -(2**63), 2**64, 10**300],
        "floats": [0.0, -0.0, 1.0, 1e16, 5e-324, -1.5, math.pi, math.nan, math.inf, -math.inf],
        "complex": [1 - 2j, complex(math.nan, -0.0)],
        "tuple": (1, (2, [3]), ()),
        "sets": [{3, 1, 2}, set(), frozenset({"b", "a"}), {frozenset({1}), (1, 2)}],
        "dicts": [{1: "one", "1": "text", None: [], (1, 2): {}}, {"$tuple": [1], "a": 2}, {}],
        "tables": [collections.OrderedDict(b=1, a=2), collections.Counter({"a": 2, None: -1})],
        "namespace": Namespace(lr=0.5, inner=Namespace(a=(1,))),
        "deques": [collections.deque([1, 2], maxlen=3), collections.deque()],
        "bytes": [b"\x00\xff$", bytearray(b"abc"), b""],
        "halves": ["\udcff", {"\ud83d": 1}],
        "ranges": [range(10), range(5, -5, -2), slice(None, 3), slice(1, 2, 3)],
        "days": [day, day.replace(tzinfo=dt.UTC, fold=0), day.replace(tzinfo=east), day.date(), day.time()],
        "times": [dt.time(1, 2, 3, tzinfo=dt.UTC), dt.timedelta(-1, 2, 3), east, dt.UTC],
        "uuid": uuid.UUID(int=2**100 + 7),
        "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("C:\\x")],
        "torch": [torch.Size([2, 0, 3]), torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda:1")],
        "integers of NumPy's": [np.bool_(1), np.int8(-3), np.uint64(2**64 - 1), np.int64(-5), np.uint16(7)],
        "floats of NumPy's": [
            np.float16(0.5),
            np.float32("nan"),
            np.float64(1.5),
            np.complex64(1 - 2j),
            np.complex128(2j),
        ],
        "tensors": {dtype: value_of(dtype, dtype, (2, 2)) for dtype in TORCH},
        "shapes": [value_of("scalar", "F64", ()), value_of("empty", "I16", (0, 4))],
        "arrays": [array_of("array", dtype, (3,)) for dtype in ("BOOL", "U8", "I64", "F16", "F32", "C64")],
        "array of nothing": array_of("", "F64", (0, 2)),
    }


GOLDEN = {state.__name__: state for state in (dtypes, files, training, slots)}


# ------------------------------------------------------------------------------------------------------------------
# Equality


def canonical(value: Any) -> Any:  # noqa: PLR0911 - one line for each kind
    """Equal only for values of equal types and equal bits, whether torch's and NumPy's or the independent reader's."""
    if isinstance(value, Tagged) and value.tag != "$numpy":
        return value.tag.replace("$inline", "$tensor"), canonical(value.payload)
    if isinstance(value, Tagged | np.generic):
        number = value.payload if isinstance(value, Tagged) else value
        return "$numpy", number.dtype.name, number.tobytes()
    if isinstance(value, Tensor):
        return tuple(value)
    if isinstance(value, torch.Tensor):
        return "$tensor", tuple(seen(value))
    if isinstance(value, np.ndarray):
        return "$array", tuple(seen(torch.from_numpy(value)))
    if isinstance(value, torch.Size | torch.dtype | torch.device):
        tags = {torch.Size: "$size", torch.dtype: "$dtype", torch.device: "$device"}
        plain = tuple(value) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
        return tags[type(value)], canonical(plain)
    return type(value).__name__, _content(value)


def _content(value: Any) -> Any:  # noqa: PLR0911 - one line for each kind
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, complex):
        return canonical(value.real), canonical(value.imag)
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(canonical(item)) for item in value)
    if isinstance(value, dict):
        return [(canonical(key), canonical(item)) for key, item in value.items()]
    if isinstance(value, collections.deque):
        return value.maxlen, [canonical(item) for item in value]
    if isinstance(value, Namespace):
        return canonical(vars(value))
    return repr(value)
