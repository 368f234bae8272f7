"""Pickles, read and written as data: nothing in them is ever imported or run."""
