"""Reading pickles as data: nothing in them is ever imported or run."""
