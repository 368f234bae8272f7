"""``python -m campaigns.torn``."""

import sys

from campaigns.torn.campaign import main

if __name__ == "__main__":
    sys.exit(main())
