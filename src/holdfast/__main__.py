"""``python -m holdfast``: the command line, if the script ``holdfast`` is not on the ``PATH``."""

from holdfast.cli.entry import main

if __name__ == "__main__":
    main()
