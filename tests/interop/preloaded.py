"""The modules of other systems that the fork server imports, named in ``tests/interop/conftest.py``."""

from campaigns.common.preloaded import preload

preload(("lightning.pytorch", "transformers.modeling_utils", "transformers.trainer", "peft"))
