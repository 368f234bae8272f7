"""``python -m campaigns.fuzz --minutes 10``: runs the campaign and keeps failing cases in ``fuzz_violations``."""

import sys

from campaigns.fuzz.campaign import main

if __name__ == "__main__":
    sys.exit(main())
