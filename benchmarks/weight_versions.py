"""``python -m benchmarks.weight_versions``: versions of weights from a real training, beside what others store of them.

A small decoder is trained on the text of Python's standard library with fp32 AdamW.

- ``size``: the bytes of a delta, beside XOR and zstd level 1 of the same two versions, which slime, SkyRL and
  ModelExpress store (it needs the package zstandard), and beside the entropy of the positions and of the differences;
  of bf16 weights, and of weights that are quantised to fp8 in blocks of 128 by 128.
- ``speed``: encoding and applying on one core, in GB of the model a second, beside the bare loops.
- ``stall``: for how long ``publish`` blocks, beside an asynchronous ``save_model``, and the memory of both.
"""

from __future__ import annotations

import argparse
import copy
import io
import resource
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import rankless
from campaigns.common.case_runner import format_table
from rankless.ondisk.block_crcs import BLOCK_BYTES
from rankless.ondisk.differences import EncodedRange, StoredRange, Words, decode_range, encode_range
from rankless.ondisk.weight_versions import MOST_WORDS

_VOCABULARY, _HEADS, _LENGTH, _BATCH = 8192, 4, 64, 8

#: The bytes of a row in the table of a part.
_ROW_BYTES = 72

#: Steps at a large rate before anything is measured: the moments are those of a training then.
_WARM_STEPS = 150

RATES = (3e-6, 1e-5, 1e-4)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        query, key, value = (
            part(h).view(*h.shape[:2], _HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        h = self.between(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class Decoder(nn.Module):
    """A decoder. With 4 layers of width 256 it has 6.8 million parameters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, _VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Training:
    """The decoder and its optimizer, on real text."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = Decoder(width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)
        words = list(_read_words())
        numbers = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(_VOCABULARY - 1))}
        self._text = torch.tensor([numbers.get(word, 0) for word in words])
        self._generator = torch.Generator().manual_seed(1)

    def steps(self, count: int, rate: float | None = None) -> None:
        """Train for some steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate or group["lr"]
        for _ in range(count):
            starts = torch.randint(0, len(self._text) - _LENGTH - 1, (_BATCH,), generator=self._generator)
            tokens = torch.stack([self._text[start : start + _LENGTH + 1] for start in starts.tolist()])
            loss = functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def words(self) -> dict[str, Words]:
        """Return the bf16 weights as words."""
        state = self.model.state_dict()
        return {
            name: tensor.bfloat16().view(torch.int16).flatten().numpy().view("<u2").copy()
            for name, tensor in state.items()
        }

    def fp8_words(self) -> dict[str, Words]:
        """Return the weights that are quantised in blocks of 128 by 128, and their scales, as words."""
        quantised: dict[str, Words] = {}
        for name, tensor in self.model.state_dict().items():
            if tensor.dim() > 1:
                rows, columns = tensor.shape
                blocks = tensor.float().view(rows // 128, 128, columns // 128, 128)
                scales = blocks.abs().amax((1, 3), keepdim=True) / 448
                quantised[name] = (blocks / scales).to(torch.float8_e4m3fn).view(torch.uint8).flatten().numpy().copy()
                quantised[f"{name}_scale"] = scales.flatten().view(torch.int32).numpy().view("<u4").copy()
        return quantised


def _read_words() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]:
        try:
            text = io.StringIO(path.read_text())
            yield from (token.string for token in tokenize.generate_tokens(text.readline) if token.string)
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            continue


def blocks_of(words: Words) -> Iterator[Words]:
    """Yield what is stored as one range each."""
    step = min(BLOCK_BYTES // words.itemsize, MOST_WORDS)
    return (words[start : start + step] for start in range(0, len(words), step))


def encode(old: Mapping[str, Words], new: Mapping[str, Words]) -> list[tuple[Words, EncodedRange | None]]:
    """Return the ranges of all tensors."""
    return [
        (after, encode_range(before, after))
        for name in new
        for before, after in zip(blocks_of(old[name]), blocks_of(new[name]), strict=True)
    ]


def size_of(ranges: list[tuple[Words, EncodedRange | None]]) -> int:
    """Return the bytes of the ranges in a part."""
    return sum(_ROW_BYTES + sum(encoded.sizes) for _, encoded in ranges if encoded is not None)


def xor_sizes(old: Mapping[str, Words], new: Mapping[str, Words]) -> int:
    """Return the bytes that XOR and zstd level 1 leave: the way of others."""
    import zstandard  # type: ignore[import-not-found]  # noqa: PLC0415 - only this needs it

    compressor = zstandard.ZstdCompressor(level=1)
    return sum(len(compressor.compress((old[name] ^ new[name]).tobytes())) for name in new)


def entropy_of(old: Mapping[str, Words], new: Mapping[str, Words]) -> float:
    """Return the bytes that the positions and the differences need at least, if each tensor has codes of its own."""
    bits = 0.0
    for name in new:
        differences = new[name] - old[name]
        changed, count = int(np.count_nonzero(differences)), len(differences)
        if not changed:
            continue
        share = changed / count
        bits += changed * -np.log2(share) + (count - changed) * -np.log2(max(1 - share, 1 / count))
        frequencies = np.unique(differences[differences != 0], return_counts=True)[1] / changed
        bits += changed * float(-(frequencies * np.log2(frequencies)).sum())
    return bits / 8


def measure_size(width: int, layers: int) -> None:
    """Print a table: bytes of deltas over 1, 8 and 20 steps, in bf16 and in fp8."""
    warm = Training(width, layers)
    warm.steps(_WARM_STEPS, 1e-3)
    print(f"a decoder of {sum(each.numel() for each in warm.model.parameters()) / 1e6:.1f} million parameters")
    head = ["learning rate", "steps apart", "weights", "changed", "ours", "XOR + zstd-1", "ours / XOR", "entropy / XOR"]
    rows = [head]
    for rate in RATES:
        training = copy.deepcopy(warm)
        training.steps(3, rate)
        first, done = (training.words(), training.fp8_words()), 0
        for apart in (1, 8, 20):
            training.steps(apart - done)
            done = apart
            for kind, old, new in zip(("bf16", "fp8"), first, (training.words(), training.fp8_words()), strict=True):
                dense = sum(words.nbytes for words in new.values())
                changed = sum(int(np.count_nonzero(old[name] != new[name])) for name in new)
                total = sum(len(words) for words in new.values())
                ours, theirs = size_of(encode(old, new)), xor_sizes(old, new)
                shares = [
                    f"{changed / total:.2%}",
                    f"{ours / dense:.2%}",
                    f"{theirs / dense:.2%}",
                    f"{ours / theirs:.2f}",
                    f"{entropy_of(old, new) / theirs:.2f}",
                ]
                rows.append([f"{rate:g}", str(apart), kind, *shares])
    print(format_table(rows[0], rows[1:]))


def measure_speed() -> None:
    """Print a table: processor time of encoding and applying one step at 1e-5, and of the bare loops."""
    training = Training()
    training.steps(_WARM_STEPS, 1e-3)
    training.steps(3, 1e-5)
    old = training.words()
    training.steps(1)
    new = training.words()
    dense = sum(words.nbytes for words in new.values())
    encoded = encode(old, new)
    copies = {name: words.copy() for name, words in old.items()}

    def apply() -> None:
        ranges = iter(encoded)
        for words in copies.values():
            for block in blocks_of(words):
                _, each = next(ranges)
                if each is not None:
                    stored = StoredRange(each.encoding, each.changed, len(block), block.dtype, each.streams, "a range")
                    decode_range(stored).apply(block)

    def compare() -> None:
        for name in new:
            np.count_nonzero(old[name] != new[name])

    def copy_all() -> None:
        for name in new:
            np.copyto(copies[name], new[name])

    rows = [["work", "GB/s of the model"]]
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(old, new),
        "XOR + zstd-1": lambda: xor_sizes(old, new),
        "bare comparison": compare,
        "apply": apply,
        "bare copy": copy_all,
    }
    for name, work in works.items():
        rows.append([name, f"{dense / _processor_seconds(work) / 1e9:.2f}"])
    print(format_table(rows[0], rows[1:]))


def _processor_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(7):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def measure_stall(megabytes: int) -> None:
    """Print a table: for how long a call blocks, and the memory that it adds, of a fp32 model published in bf16."""
    rows = [["call", "blocks (median)", "in all", "memory above the model"]]
    folder = Path(tempfile.mkdtemp(prefix="rankless-versions-"))
    state = {f"w{i}": torch.randn(2**20 * 4) * 0.02 for i in range(megabytes // 16)}
    try:
        for name, call in _calls(folder).items():
            blocked, whole = [], []
            base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for step in range(8):
                for tensor in state.values():
                    tensor[step::23] *= 1.001
                began = time.perf_counter()
                handle = call(state, step)
                blocked.append(time.perf_counter() - began)
                handle.wait()
                whole.append(time.perf_counter() - began)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024
            rows.append(
                [
                    name,
                    f"{statistics.median(blocked[2:]) * 1000:.0f} ms",
                    f"{statistics.median(whole[2:]) * 1000:.0f} ms",
                    f"{grown:.0f} MiB",
                ]
            )
            rankless.finalize()
    finally:
        shutil.rmtree(folder)
    print(f"a model of {megabytes} MB in fp32, {megabytes // 2} MB in bf16")
    print(format_table(rows[0], rows[1:]))


def _calls(folder: Path) -> dict[str, Callable[[Any, int], Any]]:
    publisher = rankless.WeightPublisher(folder / "weights", dtype="bfloat16", anchor_every=1000)
    return {
        "save_model, fp32": lambda state, _: rankless.save_model(state, folder / "fp32", shard=True, async_save=True),
        "save_model, bf16": lambda state, _: rankless.save_model(
            state, folder / "bf16", shard=True, dtype="bfloat16", async_save=True
        ),
        "publish, bf16": lambda state, step: publisher.publish(state, step=step),
    }


def main() -> int:
    """Measure what was asked for, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_versions", description=__doc__)
    parser.add_argument("what", nargs="*", choices=["size", "speed", "stall", []], help="default: all")
    parser.add_argument("--megabytes", type=int, default=512, help="the size of the model of `stall` (default: 512)")
    parser.add_argument(
        "--width", type=int, default=256, help="of the model of `size`, a multiple of 128 (default: 256)"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the model of `size` (default: 4)")
    options = parser.parse_args()
    works: dict[str, Callable[[], None]] = {
        "size": lambda: measure_size(options.width, options.layers),
        "speed": measure_speed,
        "stall": lambda: measure_stall(options.megabytes),
    }
    for name in options.what or works:
        works[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
