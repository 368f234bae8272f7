"""The file format of ``torch.save``: a zip file with a pickle and the raw bytes of the storages."""
