"""``python -m rankless.lightning.consolidate_checkpoint``: the command of Lightning's guide, for all folders.

It runs ``rankless consolidate`` in one process.
"""

from __future__ import annotations

import sys

from rankless.cli.main import app

if __name__ == "__main__":
    app(["consolidate", *sys.argv[1:]], prog_name="rankless")
