"""Saving and loading of single components: a model, an optimizer or a scheduler in its own file or folder."""
