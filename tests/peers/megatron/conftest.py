"""What megatron-core wrote is needed here as well."""

from tests.interop.megatron.conftest import fixtures

__all__ = ["fixtures"]
