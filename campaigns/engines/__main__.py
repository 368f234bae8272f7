"""``python -m campaigns.engines``: models of vLLM, loaded by ``open_weights`` and by vLLM's own loader.

Each rank of each layout is built in this process, one after the other. Both ways must give the same parameters and
buffers, bit for bit. What vLLM itself cannot load is listed, and does not count. ``make engines`` installs vLLM first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import rankless
from campaigns.engines.fake_ranks import Layout, build_rank
from campaigns.engines.tiny_models import ALWAYS, write_drawn_models, write_model
from rankless.inference.filled_parameters import check_filled


@dataclass(frozen=True)
class Result:
    """What one rank has got. ``fault``: what is wrong; ``refused``: why vLLM's own loader cannot load this."""

    fault: str = ""
    refused: str = ""
    needed: float = 0.0
    read: float = 0.0
    computed: str = ""

    def __str__(self) -> str:
        if self.refused:
            return f"not loaded by vLLM itself: {self.refused}"
        sizes = f"needed {self.needed:.3f} and read {self.read:.3f} of the parameters"
        return f"{f'WRONG: {self.fault}' if self.fault else 'equal'}, {sizes}{self.computed and f'; {self.computed}'}"


def main() -> int:
    """Compare all models in all layouts. Return 1 if a rank has got other bits."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.engines", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws the further architectures (default: 1)")
    parser.add_argument("--more", type=int, default=10, help="how many further architectures (default: 10)")
    parser.add_argument("--model", action="append", choices=ALWAYS, help="only this one; may be given several times")
    parser.add_argument("--layouts", default="tp1,tp2,tp4,pp2,ep2", help="(default: %(default)s)")
    options = parser.parse_args()
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="rankless-") as root:
        for folder in _write_models(options, Path(root)):
            for layout in map(Layout, options.layouts.split(",")):
                for rank in range(layout.size):
                    result = compare(folder, layout, rank)
                    print(f"{folder.name}, {layout.name}, rank {rank}: {result}", flush=True)
                    results["wrong" if result.fault else "not loaded by vLLM" if result.refused else "equal"] += 1
    print(", ".join(f"{count} {name}" for name, count in results.items()))
    return int(results["wrong"] > 0 or not results["equal"])


def _write_models(options: argparse.Namespace, root: Path) -> Iterator[Path]:
    for name in options.model or ALWAYS:
        yield write_model(name, root)
    if not options.model:
        yield from write_drawn_models(options.seed, options.more, root)


def compare(folder: Path, layout: Layout, rank: int) -> Result:
    """Load a model in both ways, and compare all parameters and buffers of the rank."""
    try:
        with build_rank(folder, layout, rank) as (model, config):
            _fill(model)
            names = model.load_weights(iter(load_file(folder / "model.safetensors").items()))
            expected = {name: tensor.detach().clone() for name, tensor in _state_of(model).items()}
            _fill(model)
            is_plain = config.model_config.quantization is None
            return _load_and_compare(model, folder, names, expected, is_plain=is_plain)
    except Exception as error:  # noqa: BLE001 - vLLM cannot build or load it
        return Result(refused=f"{type(error).__name__}: {error}".replace("\n", " ")[:120])


def _load_and_compare(
    model: Any, folder: Path, names: object, expected: dict[str, torch.Tensor], *, is_plain: bool
) -> Result:
    try:
        with rankless.open_weights(folder, process_group="self") as weights:
            loaded = model.load_weights(weights)
            if is_plain:
                check_filled(model, [weights])
    except Exception as error:  # noqa: BLE001 - a fault of rankless
        return Result(f"{type(error).__name__}: {error}")
    state, report = _state_of(model), weights.report
    wrong = [name for name in expected if name not in state or not _is_equal(expected[name], state[name])]
    own = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in model.parameters()}.values())
    fault = (
        f"{len(wrong)} tensors, such as {wrong[0]}" if wrong else "" if loaded == names else "other names are loaded"
    )
    operations = {**report.computed, **report.whole}
    computed = f"computed with {len(operations)}, such as {next(iter(operations.items()))}" if operations else ""
    return Result(fault, "", report.needed / max(own, 1), report.read / max(own, 1), computed)


def _fill(model: Any) -> None:
    """Give all parameters values that no file has."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7) if parameter.dtype.is_floating_point else parameter.zero_()


def _state_of(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if type(second) is rankless.inference.lazy_tensor.LazyTensor or first.dtype != second.dtype:
        return False
    return torch.equal(_bytes_of(first), _bytes_of(second))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


if __name__ == "__main__":
    sys.exit(main())
