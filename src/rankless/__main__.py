"""``python -m rankless``: the command line, if the script ``rankless`` is not on the ``PATH``."""

from rankless.cli.entry import main

if __name__ == "__main__":
    main()
