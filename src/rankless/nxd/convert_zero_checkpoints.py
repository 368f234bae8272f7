"""``python -m rankless.nxd.convert_zero_checkpoints``: NxD's offline converter of ZeRO-1 states."""

from __future__ import annotations

import sys

from rankless.cli.main import app

if __name__ == "__main__":
    app(["nxd-convert-zero-checkpoints", *sys.argv[1:]], prog_name="rankless")
