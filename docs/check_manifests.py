"""Check the manifests in the guides against the schemas of Kubernetes. ``make docs`` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import yaml

_GUIDE = Path(__file__).parent / "guides/kubernetes.md"

#: A version of Kubernetes that is in use for long.
_VERSION = "1.31"


def main() -> None:
    """Raise an error that names the first field that is wrong or unknown."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", _GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    kinds = [manifest["kind"] for block in blocks for manifest in _check(block)]
    if sorted(kinds) != ["Job", "Service"]:
        raise SystemExit(f"{_GUIDE} has the manifests {kinds}")


def _check(block: str) -> list[dict[str, str]]:
    manifests = list(yaml.safe_load_all(block))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, _VERSION, strict=True)
    return manifests


if __name__ == "__main__":
    main()
