"""The version of the package that is installed; it is taken from the repository's tags when it is built."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rankless")
except PackageNotFoundError:  # the source itself, on the path
    __version__ = "0+unknown"
