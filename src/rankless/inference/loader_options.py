"""The options of the load format ``rankless``, as engines pass them by ``--model-loader-extra-config``.

The loaders of vLLM and SGLang read them on each rank. Users write these names: they stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rankless.errors import InvalidArgumentError
from rankless.inference.open_weights import Verify, check_verify


@dataclass(frozen=True)
class LoaderOptions:
    """The options. See :func:`rankless.open_weights`. Without a ``path``, the model's own files are loaded."""

    path: str | None = None
    tag: str | None = None
    verify: Verify = True
    timeout: float = 600.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the options. Raises ``InvalidArgumentError``, which names the mistake."""
        types = {"path": str, "tag": str, "verify": bool | str, "timeout": int | float}
        for name, value in config.items():
            if name not in types:
                raise InvalidArgumentError(
                    f"--model-loader-extra-config: the load format rankless has no option {name!r}; it has "
                    + ", ".join(types)
                )
            if not isinstance(value, types[name]) or (name != "verify" and isinstance(value, bool)):
                raise InvalidArgumentError(f"--model-loader-extra-config: {name!r} must not be {value!r}")
        check_verify(config.get("verify", True))
        return cls(**config)
