"""Lets SGLang import torchvision: that of PyPI is built for CUDA, and lacks its operators with a torch for CPUs.

It is imported before SGLang, in each process.
"""

from __future__ import annotations

from contextlib import suppress

import torch

with suppress(RuntimeError):  # a torchvision for this torch has them
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
