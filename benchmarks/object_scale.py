"""``python -m benchmarks.object_scale``: what ranks send each other when they save into an object store, by plans.

A part of an object has one sender, so ranks with less than a part of a tensor pass their bytes on. It plans a few ranks
of large jobs (FSDP2, Llama-3 in bfloat16 with Adam in float32), and prints a table for ``docs/scale.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rankless.engine.comm.spec_directory import SpecDigests, SpecDirectory, digest_specs
from rankless.engine.io.upload_parts import GRAIN
from rankless.engine.io.upload_target import PART_BYTES
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.layout_types import MeshShape, Sharded
from rankless.engine.plan.save_plan import SavePlan, plan_save
from rankless.engine.plan.tensor_specs import LayoutSpec, Meshes, Spec, TensorSpec
from rankless.ondisk.data_files import parse_size


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama-3 model."""

    name: str
    layers: int
    width: int
    hidden: int
    keys: int
    vocabulary: int = 128_256

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters."""
        yield "tok_embeddings.weight", (self.vocabulary, self.width)
        for layer in range(self.layers):
            of_layer = {
                "attention.wq": (self.width, self.width),
                "attention.wk": (self.keys, self.width),
                "attention.wv": (self.keys, self.width),
                "attention.wo": (self.width, self.width),
                "feed_forward.w1": (self.hidden, self.width),
                "feed_forward.w2": (self.width, self.hidden),
                "feed_forward.w3": (self.hidden, self.width),
                "attention_norm": (self.width,),
                "ffn_norm": (self.width,),
            }
            yield from ((f"layers.{layer}.{name}.weight", shape) for name, shape in of_layer.items())
        yield "norm.weight", (self.width,)
        yield "output.weight", (self.vocabulary, self.width)


JOBS = (
    (Llama("8B", 32, 4096, 14_336, 1024), (8, 64, 512)),
    (Llama("405B", 126, 16_384, 53_248, 1024), (512, 2048, 16_384)),
)


def main() -> None:
    """Plan and print."""
    print("| model | ranks | rank | own bytes | passed on | messages | to ranks | received | from ranks | parts sent |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for model, sizes in JOBS:
        for ranks in sizes:
            spec = _build_spec(model, ranks)
            for rank in sorted({0, 1, ranks // 3, ranks // 2, ranks - 1}):
                plan = plan_save(spec, rank, parse_size("1GB"), range(ranks), GRAIN)
                print(f"| {model.name} | {ranks} | {rank} | {_describe(plan)} |", flush=True)


def _build_spec(model: Llama, ranks: int) -> GlobalSpec:
    tensors = [TensorSpec("model", name, "BF16", shape, 0) for name, shape in model.shapes()]
    for key in ("exp_avg", "exp_avg_sq"):
        tensors += [TensorSpec("optimizer", f"{name}/{key}", "F32", shape, 0) for name, shape in model.shapes()]
    spec = Spec((LayoutSpec(0, (Sharded(0),)),), tuple(tensors))
    meshes = Meshes((MeshShape((ranks,), tuple(range(ranks))),))
    directory = SpecDirectory.from_digests([SpecDigests(*digest_specs(spec, meshes))] * ranks)
    contributions = [directory.encode_contribution(0, spec, meshes), *[(b"", b"")] * (ranks - 1)]
    return directory.build_global_spec(contributions, range(ranks))


def _describe(plan: SavePlan) -> str:
    sent = sum(transfer.stop - transfer.start for transfer in plan.sent)
    received = int(plan.received.sizes.sum())
    own = plan.nbytes
    senders = len(set(plan.received.ranks.tolist()))
    columns = (
        f"{own / 1e6:.1f} MB",
        f"{sent / own:.0%}",
        len(plan.sent),
        len({transfer.rank for transfer in plan.sent}),
        f"{received / 1e6:.1f} MB in {len(plan.received.ranks)}",
        senders,
        round((own - sent + received) / PART_BYTES, 1),
    )
    return " | ".join(map(str, columns))


if __name__ == "__main__":
    main()
