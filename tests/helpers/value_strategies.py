"""Hypothesis strategies for the values that a checkpoint holds."""

from __future__ import annotations

import collections
import datetime as dt
import pathlib
from argparse import Namespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from rankless.state.tensor_views import DTYPES

texts = st.text() | st.text(st.characters()) | st.text("\ud83d\ude00\udcff$a", max_size=4)


zones = (
    st.none() | st.just(dt.UTC) | st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)))
)


folds = st.integers(0, 1)


plain_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**9_999), 2**9_999)
    | st.floats()
    | st.complex_numbers()
    | texts
    | st.binary(max_size=20)
)


time_values = (
    st.dates()
    | st.timedeltas()
    | st.builds(lambda case, zone, fold: case.replace(tzinfo=zone, fold=fold), st.datetimes(), zones, folds)
    | st.builds(lambda case, zone, fold: case.replace(tzinfo=zone, fold=fold), st.times(), zones, folds)
    | zones
)


short_texts = st.text("abc./\\ é", max_size=6)


def windows_path(word: str) -> pathlib.PureWindowsPath:
    """Written once: of some words, such as ``//.//``, Python makes a path whose text makes another, equal one."""
    return pathlib.PureWindowsPath(str(pathlib.PureWindowsPath(word)))


paths = (
    st.builds(pathlib.Path, short_texts)
    | st.builds(pathlib.PurePosixPath, short_texts)
    | st.builds(windows_path, short_texts)
)


numpy_dtypes = st.sampled_from([np.dtype(name).type for name in (*"?bhilBHILefdF",)])


scalars = (numpy_dtypes | st.just(np.complex128)).flatmap(
    lambda kind: st_numpy.arrays(kind, ()).map(lambda array: array[()])
)


torch_dtypes = st.sampled_from(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)


devices = st.sampled_from(["cpu", "cuda", "cuda:7", "meta", "mps", "xpu:1"]).map(torch.device)


sizes = st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size)


hashable = st.recursive(
    plain_values | time_values | paths | st.uuids() | scalars | torch_dtypes | devices | sizes,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)


numpy_arrays = numpy_dtypes.flatmap(
    lambda kind: st_numpy.arrays(kind, st_numpy.array_shapes(min_dims=0, min_side=0, max_side=3))
)


torch_tensors = st.builds(
    lambda dtype, shape, seed: (
        torch.randint(
            0,
            2 if dtype is torch.bool else 256,
            (*shape, dtype.itemsize),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        .view(dtype)
        .reshape(shape)
    ),
    st.sampled_from([dtype for name, dtype in DTYPES.items() if name != "F4"]),  # torch copies and converts none of it
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 100),
)


small_integers = st.integers(-100, 100)


range_steps = st.integers(-5, 5).filter(bool)


leaves = (
    hashable
    | numpy_arrays
    | torch_tensors
    | st.binary(max_size=9).map(bytearray)
    | st.builds(range, small_integers, small_integers, range_steps)
    | st.builds(slice, st.none() | small_integers, st.none() | small_integers, st.none() | small_integers)
)


def make_namespace(table: dict[str, Any]) -> Namespace:
    """With attributes of any name, ``__dict__`` too."""
    space = Namespace()
    vars(space).update(table)
    return space


def branches(inner: st.SearchStrategy) -> st.SearchStrategy:
    tables = st.dictionaries(hashable, inner, max_size=3)
    named = st.dictionaries(texts | st.sampled_from(["$tuple", "$", "__metadata__"]), inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | st.sets(hashable, max_size=3)
        | tables
        | named
        | tables.map(collections.OrderedDict)
        | st.dictionaries(hashable, st.integers() | st.floats(), max_size=3).map(collections.Counter)
        | st.builds(collections.deque, lists, st.none() | st.integers(3, 9))
        | named.map(make_namespace)
    )


trees = st.dictionaries(texts, st.recursive(leaves, branches, max_leaves=12), max_size=4)
