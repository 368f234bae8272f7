"""Edits of weights beside mergekit's: some layers of a model, and the average of two models.

Both read and write folders of transformers in bfloat16, start with cold caches, and end when their output is durable.
Only rankless verifies: it has no CRCs of such a source, and reads its output back unless disabled. mergekit edits
weights only, so no optimizer is part of this. It must be installed: ``pip install mergekit``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

import rankless
from benchmarks import raw
from benchmarks.conversion import Convert, measure_against_cp
from benchmarks.measure import Table
from benchmarks.peers import OURS
from benchmarks.setting import Setting

#: The shape of the model, which has as many layers as fit.
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 2048, 5632, 32_000

_PEER = "mergekit"


def measure_merges(setting: Setting) -> Iterator[Table]:
    """Measure both edits. The second model of an average is not counted by ``cp``, which copies one model."""
    if find_spec(_PEER) is None:
        print("mergekit is not installed: its edits are not measured")
        return
    for folder, nbytes in ((setting.folder / "large", setting.nbytes), (setting.folder / "small", 10**6)):
        _save_models(folder, nbytes)
    converts: dict[str, dict[str, Convert]] = {
        "layers": {
            OURS: _drop_layer,
            f"{OURS}, verify=False": partial(_drop_layer, verify=False),
            _PEER: _pass_through,
        },
        "average": {OURS: _average, f"{OURS}, verify=False": partial(_average, verify=False), _PEER: _merge_linearly},
    }
    for name, ways in converts.items():
        yield from measure_against_cp(setting, f"weights only, {name}", "model", ways)


def _drop_layer(source: Path, made: Path, *, verify: bool = True) -> None:
    rankless.edit(source, made, ["layers drop=0"], to="hf", verify=verify)


def _average(source: Path, made: Path, *, verify: bool = True) -> None:
    verb = {"verb": "average", "paths": [str(source.with_name("other"))]}
    rankless.edit(source, made, [verb], to="hf", verify=verify)


def _pass_through(source: Path, made: Path) -> None:
    layers = LlamaConfig.from_pretrained(source).num_hidden_layers
    slices = [{"sources": [{"model": str(source), "layer_range": [1, layers]}]}]
    _run_mergekit({"merge_method": "passthrough", "dtype": "bfloat16", "slices": slices}, made)


def _merge_linearly(source: Path, made: Path) -> None:
    models = [{"model": str(path), "parameters": {"weight": 1.0}} for path in (source.with_name("other"), source)]
    _run_mergekit({"merge_method": "linear", "dtype": "bfloat16", "models": models}, made)


def _run_mergekit(recipe: dict[str, Any], made: Path) -> None:
    from mergekit.config import MergeConfiguration  # noqa: PLC0415 - only here
    from mergekit.merge import run_merge  # noqa: PLC0415
    from mergekit.options import MergeOptions  # noqa: PLC0415

    options = MergeOptions(lazy_unpickle=True, copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(recipe), str(made), options)
    raw.sync_tree(made)


def _save_models(folder: Path, nbytes: int) -> None:
    """Save two models of about ``nbytes`` in bfloat16, in files of 1 GB."""
    scale = 1 if nbytes > 10**8 else 32
    hidden, intermediate, vocabulary = (size // scale for size in (_HIDDEN, _INTERMEDIATE, _VOCABULARY))
    layer = 2 * (4 * hidden**2 + 3 * hidden * intermediate)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        num_hidden_layers=max(2, (nbytes - 4 * vocabulary * hidden) // layer),
        num_attention_heads=max(1, hidden // 128),
        dtype="bfloat16",
    )
    for name in ("model", "other"):
        with no_init_weights():
            model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            parameter.data = torch.rand(parameter.shape).to(torch.bfloat16)
        model.save_pretrained(folder / name, max_shard_size="1GB")
