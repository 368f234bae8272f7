"""The folders of Accelerate's ``save_state`` and of the checkpoints of transformers' ``Trainer``.

``formats/registry.py`` names the reader: each rank of a load or conversion opens it.
"""
