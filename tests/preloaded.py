"""The modules that the fork server of tests imports too, as most ranks need them: named in ``tests/conftest.py``."""

from campaigns.common.preloaded import preload

preload(("hypothesis", "tests.promises.moments", "torch.distributed.optim"))
