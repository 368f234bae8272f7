"""A module for ``torch.save(pickle_module=…)``: it writes objects of classes that are not installed, by their names.

:mod:`rankless.deepspeed.writer.universal_target` passes it to torch, in the process that writes.
"""

from rankless.formats.torchfile.pickler import RecordPickler as Pickler

__all__ = ["Pickler"]
