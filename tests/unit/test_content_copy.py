"""Tests the copy of content that a caller passes with a step, and may change before it is saved."""

from typing import Any

import numpy as np
import pytest
import torch

from rankless.save.content_copy import copy_content


class Uncopyable:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError("it cannot be copied")


def test_what_the_caller_changes_later_is_not_in_the_copy() -> None:
    weight = torch.ones(2, requires_grad=True)
    content = {"list": [1, "a"], "nested": ({"x": {2}},), "tensor": weight * 3, "array": np.arange(3)}
    copied = copy_content(content)
    content["list"].append(2)
    content["nested"][0]["x"].add(4)
    content["tensor"].detach().zero_()
    content["array"][:] = 0
    assert (copied["list"], copied["nested"]) == ([1, "a"], ({"x": {2}},))
    assert (copied["tensor"].tolist(), copied["array"].tolist()) == ([3.0, 3.0], [0, 1, 2])
    assert copied["tensor"].grad_fn is None


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ([[0]] * 4_999, [[0]] * 5_001),  # values are counted as often as they are in a container
        ([torch.zeros(2**18)], [torch.zeros(2**18 + 1)]),
        (["a" * 2**20], ["a" * (2**20 + 1)]),
    ],
    ids=["10,000 values", "1 MiB of a tensor", "1 MiB of text"],
)
def test_large_content_is_not_copied(small: Any, large: Any) -> None:
    assert copy_content(small) is not small
    assert copy_content(large) is large


def test_content_that_cannot_be_copied_is_left_to_its_save() -> None:
    content = [Uncopyable()]
    assert copy_content(content) is content
