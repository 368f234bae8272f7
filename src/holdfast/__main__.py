"""``python -m holdfast``: the command line, where the script is not on the path."""

from holdfast.cli.entry import main

if __name__ == "__main__":
    main()
