"""The tests and figures of an accelerator, on a machine that may have no network: packed on one, run on another."""
