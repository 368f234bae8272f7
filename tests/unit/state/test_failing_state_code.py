"""Tests of code of the user that fails while a save asks objects for their state."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

import rankless
from rankless.errors import StateError


class Gives(optim.SGD):
    """Gives any value as its state dict, or fails."""

    def __init__(self, params: Any, given: Any) -> None:
        super().__init__(params, lr=0.1)
        self.given = given

    def state_dict(self) -> Any:
        if self.given is None:
            raise ZeroDivisionError("no steps")
        return self.given

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("argument", ["optimizer", "scheduler", "stateful", "dataloader"])
def test_code_that_fails_is_named(argument: str, tmp_path: Path) -> None:
    failing = Gives(nn.Linear(2, 2).parameters(), None)
    arguments: dict[str, Any] = {argument: {"x": failing} if argument == "stateful" else failing}
    with pytest.raises(StateError, match="code of Gives that runs in state_dict failed: ZeroDivisionError: no steps"):
        rankless.save_checkpoint(tmp_path, "a", **arguments)
    assert not rankless.has_checkpoint(tmp_path)


@pytest.mark.parametrize("given", [5, {"state": 5}, {"param_groups": 7}])
def test_a_state_dict_of_an_optimizer_has_its_form(given: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"state_dict\(\) of Gives must return a dict with state"):
        rankless.save_checkpoint(tmp_path, "a", model, Gives(model.parameters(), given))
