"""A module for ``torch.save(pickle_module=…)``: it writes objects of classes that are not installed, by their names."""

from rankless.formats.torchfile.pickler import RecordPickler as Pickler

__all__ = ["Pickler"]
