"""The optimizers of torch and of packages, by package and name, and how each is created and stepped."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from torch import nn, optim
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Recipe:
    """How an optimizer of a model is created, and how ``training.take_step`` steps it."""

    make: Callable[[nn.Module], Any]
    stepping: str = "step"


#: The packages, by the name that pip and the table have, with the module that has the optimizers.
PACKAGES = {
    "torch": "torch.optim",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "schedulefree": "schedulefree",
    "transformers": "transformers",
    "pytorch_optimizer": "pytorch_optimizer",
    "prodigyopt": "prodigyopt",
    "lion_pytorch": "lion_pytorch",
    "galore_torch": "galore_torch",
}


def is_installed(package: str) -> bool:
    """Return whether a package of :data:`PACKAGES` can be imported."""
    try:
        importlib.import_module(PACKAGES[package])
    except ImportError:
        return False
    return True


def installed_version(package: str) -> str:
    """Return the version of an installed package, without the build."""
    return version(package.replace("_", "-")).partition("+")[0]


def list_recipes(package: str) -> dict[str, Recipe]:
    """Return the optimizers of an installed package, by name."""
    return dict(_LISTS[package](importlib.import_module(PACKAGES[package])))


def _all_parameters(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def _split(model: nn.Module, matrices: dict[str, Any], others: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two groups: the matrices and the other parameters, with settings of their own."""
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return [{"params": _matrices(model), **matrices}, {"params": rest, **others}]


def _of_parameters(
    kind: Callable[..., Any], select: Callable[[nn.Module], Any] = _all_parameters, **settings: Any
) -> Callable[[nn.Module], Any]:
    return lambda model: kind(select(model), **_foreach_off(kind, model) | settings)


#: The setting without which BSAM cannot take a step, and most optimizers of pytorch_optimizer none with a ``DTensor``.
_PER_TENSOR: dict[str, Any] = {"foreach": False}


def _foreach_off(kind: Callable[..., Any], model: nn.Module) -> dict[str, Any]:
    """Return :data:`_PER_TENSOR` for a package's optimizer of a sharded model, if it has the setting."""
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    is_torch = getattr(kind, "__module__", "").startswith("torch.")
    has_setting = "foreach" in inspect.signature(kind).parameters
    return _PER_TENSOR if is_sharded and has_setting and not is_torch else {}


def _of_classes(
    module: Any, names: Iterable[str], settings: dict[str, dict[str, Any]], **common: Any
) -> Iterator[tuple[str, Recipe]]:
    for name in names:
        yield name, Recipe(_of_parameters(getattr(module, name), **common, **settings.get(name, {})))


def _list_torch(module: Any) -> Iterator[tuple[str, Recipe]]:
    settings: dict[str, dict[str, Any]] = {
        "SGD": {"momentum": 0.9},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "AdamW": {"amsgrad": True},
    }
    names = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
    yield from _of_classes(module, (*names, "Rprop", "SGD"), settings, lr=0.01)
    yield "Adam(fused)", Recipe(_of_parameters(module.Adam, fused=True))
    yield "AdamW(foreach)", Recipe(_of_parameters(module.AdamW, foreach=True))
    yield "LBFGS", Recipe(_of_parameters(module.LBFGS, max_iter=2, history_size=3), "closure")
    yield "SparseAdam", Recipe(_of_parameters(module.SparseAdam), "sparse")
    if hasattr(module, "Muon"):
        yield "Muon", Recipe(_of_parameters(module.Muon, _matrices))


def _list_torchao(module: Any) -> Iterator[tuple[str, Recipe]]:
    names = ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")
    yield from _of_classes(module, names, {}, lr=0.01)
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        kind = getattr(module, name)
        yield f"{name}(bf16_stochastic_round)", Recipe(_of_parameters(kind, lr=0.01, bf16_stochastic_round=True))
    yield "CPUOffloadOptimizer", Recipe(_of_parameters(module.CPUOffloadOptimizer, optimizer_class=optim.AdamW))


def _list_bitsandbytes(module: Any) -> Iterator[tuple[str, Recipe]]:
    names = ("Adagrad", "Adam", "AdamW", "AdEMAMix", "LAMB", "LARS", "Lion", "RMSprop", "SGD")
    settings = {f"{kind}{bits}": {"momentum": 0.9} for kind in ("LARS", "SGD") for bits in ("", "8bit", "32bit")}
    all_names = [f"{name}{bits}" for name in names for bits in ("", "8bit", "32bit")]
    paged = [f"Paged{name}{bits}" for name in ("Adam", "AdamW", "AdEMAMix", "Lion") for bits in ("", "8bit", "32bit")]
    yield from _of_classes(module, [name for name in all_names + paged if hasattr(module, name)], settings, lr=0.01)


def _list_schedulefree(module: Any) -> Iterator[tuple[str, Recipe]]:
    for name in ("AdamW", "RAdam", "SGD"):
        for end, stepping in (
            ("ScheduleFree", "step"),
            ("ScheduleFreeReference", "step"),
            ("ScheduleFreeClosure", "closure"),
        ):
            if kind := getattr(module, name + end, None):
                yield name + end, Recipe(_of_parameters(kind, lr=0.01), stepping)
    for name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"):
        yield name, Recipe(functools.partial(_wrap, getattr(module, name), optim.SGD, momentum=0.9))


def _wrap(wrapper: Callable[..., Any], inner: Callable[..., Any], model: nn.Module, **settings: Any) -> Any:
    return wrapper(inner(model.parameters(), lr=0.01), **settings)


def _list_transformers(module: Any) -> Iterator[tuple[str, Recipe]]:
    fixed: dict[str, Any] = {"lr": 0.01, "relative_step": False, "scale_parameter": False}
    yield "Adafactor", Recipe(_of_parameters(module.Adafactor, **fixed))
    yield "Adafactor(relative_step)", Recipe(_of_parameters(module.Adafactor, warmup_init=True, relative_step=True))


#: Settings of the groups of matrices, for optimizers that project them.
_LOW_RANK = {"rank": 4, "update_proj_gap": 2, "scale": 0.25}


def _list_pytorch_optimizer(module: Any) -> Iterator[tuple[str, Recipe]]:
    special = dict(_special_recipes(module))
    for name in sorted(module.get_supported_optimizers()):
        yield name, special.get(name) or Recipe(functools.partial(_make_default, module.load_optimizer(name)))
    adamw = optim.AdamW
    yield "Lookahead", Recipe(functools.partial(_wrap, module.Lookahead, adamw, k=2))
    yield "OrthoGrad", Recipe(functools.partial(_wrap, module.OrthoGrad, adamw))
    yield "TRAC", Recipe(functools.partial(_wrap, module.TRAC, adamw))
    yield "SAM", Recipe(_of_parameters(module.SAM, base_optimizer=adamw, lr=0.01), "twice")


def _make_default(kind: Callable[..., Any], model: nn.Module) -> Any:
    return kind(model.parameters(), lr=0.01, **_foreach_off(kind, model))


def _special_recipes(module: Any) -> Iterator[tuple[str, Recipe]]:
    load = module.load_optimizer
    for name in ("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon"):
        groups = functools.partial(_split, matrices={"use_muon": True}, others={"use_muon": False})
        yield name, Recipe(_of_parameters(load(name), groups))
    for name in ("apollo", "fira", "galore"):
        projection = {"projection_type": "random"} if name == "apollo" else {"projection_type": "std"}
        groups = functools.partial(_split, matrices=_LOW_RANK | projection, others={})
        yield name, Recipe(_of_parameters(load(name), groups, lr=0.01))
    for name in ("adahessian", "sophiah"):
        yield name, Recipe(_of_parameters(load(name), lr=0.01), "graph")
    for name in ("adalomo", "lomo"):
        yield name, Recipe(functools.partial(load(name), lr=0.01), "fused")
    yield "adammini", Recipe(functools.partial(load("adammini"), lr=0.01))
    yield "alig", Recipe(_of_parameters(load("alig"), max_lr=0.01), "value")
    yield "bsam", Recipe(_of_parameters(load("bsam"), num_data=12, lr=0.01, **_PER_TENSOR), "twice")
    yield "lbfgs", Recipe(_of_parameters(load("lbfgs"), max_iter=2, history_size=3), "closure")
    # Whole factors of the large matrix would take minutes.
    yield "kron", Recipe(_of_parameters(load("kron"), lr=0.01, max_size_triangular=16))
    yield "ranger21", Recipe(_of_parameters(load("ranger21"), num_iterations=20, lr=0.01))
    yield "spectralsphere", Recipe(_of_parameters(load("spectralsphere"), _matrices, lr=0.01))


def _list_prodigyopt(module: Any) -> Iterator[tuple[str, Recipe]]:
    yield "Prodigy", Recipe(_of_parameters(module.Prodigy))


def _list_lion_pytorch(module: Any) -> Iterator[tuple[str, Recipe]]:
    yield "Lion", Recipe(_of_parameters(module.Lion, lr=0.01))


def _list_galore_torch(module: Any) -> Iterator[tuple[str, Recipe]]:
    groups = functools.partial(_split, matrices=_LOW_RANK | {"proj_type": "std"}, others={})
    for name in ("GaLoreAdamW", "GaLoreAdafactor", "GaLoreAdamW8bit"):
        settings = {"relative_step": False} if name == "GaLoreAdafactor" else {}
        yield name, Recipe(_of_parameters(getattr(module, name), groups, lr=0.01, **settings))


_LISTS: dict[str, Callable[[Any], Iterator[tuple[str, Recipe]]]] = {
    "torch": _list_torch,
    "torchao": _list_torchao,
    "bitsandbytes": _list_bitsandbytes,
    "schedulefree": _list_schedulefree,
    "transformers": _list_transformers,
    "pytorch_optimizer": _list_pytorch_optimizer,
    "prodigyopt": _list_prodigyopt,
    "lion_pytorch": _list_lion_pytorch,
    "galore_torch": _list_galore_torch,
}
