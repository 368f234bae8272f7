import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """The accelerator of this machine. Without one, the tests are skipped."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.skip("this machine has no accelerator: nothing was tested on one")
    return f"{accelerator.type}:0"
