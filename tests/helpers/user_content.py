"""User content with a value of each kind that the commands print."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import torch

USER_CONTENT = {
    "total_steps": 3,
    "cli_args": {"lr": 3e-4, "data": "/data/" + "x" * 60},
    "losses": [0.5] * 1000,
    "ema": torch.zeros(3, 4),
    "best": float("nan"),
    "numbers": {"a": np.float32(2.5), "b": np.int64(-7), "c": np.complex64(1 - 2j), "d": np.uint64(2**63)},
    "types": {"dtype": torch.bfloat16, "device": torch.device("cpu"), "size": torch.Size([2, 3])},
    "namespace": Namespace(lr=0.5),
    "\x1b[31mred": "\x1b[2J",
}
