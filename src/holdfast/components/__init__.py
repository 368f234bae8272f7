"""One part of a training state at a time: a model, an optimizer or a scheduler, in a file or a folder of its own."""
