"""Checkpoints of ``torch.distributed.checkpoint``, from torch and chunk by chunk."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from rankless.dcp_versions import DCP_VERSION
from rankless.engine.plan.element_ranges import IndexBox
from tests.helpers.boxes import box_slices


def save_dcp(path: Path, state: dict[str, Any], **options: Any) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True, **options)
    return path


def train_model(steps: int = 3, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        milestones=[1],
    )
    for number in range(steps):
        train_step(model, optimizer, scheduler, number)
    return model, optimizer, scheduler


def train_step(model: nn.Module, optimizer: Any, scheduler: Any, number: int) -> None:
    model(torch.full((2, 3), float(number))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def state_by_name(model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "lr_scheduler": scheduler.state_dict(),
        "step": 3,
    }


def write_chunks(
    path: Path, states: dict[str, tuple[torch.Tensor, list[IndexBox]]], order: Callable[[int], Any]
) -> None:
    """As torch writes: each chunk a whole file of ``torch.save``, one after another, and its own classes pickled."""
    path.mkdir(parents=True)
    metadata = Metadata({}, {}, {}, StorageMeta("x"))
    metadata.version = DCP_VERSION
    raw = {"__0_0.distcp": b"", "__1_0.distcp": b""}
    for name, (tensor, boxes) in states.items():
        chunks = []
        for number, box in enumerate(boxes):
            stream = io.BytesIO()
            part = tensor[box_slices(box)]
            torch.save(part.clone().permute(order(part.ndim)).clone().permute(invert_order(order(part.ndim))), stream)
            file = f"__{number % 2}_0.distcp"
            place = _StorageInfo(file, len(raw[file]), len(stream.getvalue()))
            raw[file] += stream.getvalue()
            chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
            metadata.storage_data[MetadataIndex(name, torch.Size(box.offset), number)] = place
        properties = TensorProperties(dtype=tensor.dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
        metadata.planner_data[name] = (name,)
    for file, data in raw.items():
        (path / file).write_bytes(data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def invert_order(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(dim) for dim in range(len(order)))
