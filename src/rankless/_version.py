"""The version of the package that is installed; it is taken from the repository's tags when it is built.

It is ``rankless.__version__``, and ``rankless --version`` prints it. Saves and conversions store it in manifests
(:mod:`rankless.save.build_manifest`), exports in model cards (:mod:`rankless.conversion.model_card`): so ``0+unknown``
may be in files, too.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rankless")
except PackageNotFoundError:  # the source itself, on the path
    __version__ = "0+unknown"
