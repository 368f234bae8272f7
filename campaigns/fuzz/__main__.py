"""``python -m campaigns.fuzz --minutes 10``: what is treated wrongly is kept in ``fuzz_violations``."""

import sys

from campaigns.fuzz.campaign import main

if __name__ == "__main__":
    sys.exit(main())
