"""``python -m campaigns.crash``."""

from campaigns.crash.campaign import main

if __name__ == "__main__":
    main()
