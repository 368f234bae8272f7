"""From any format to any other, a buffer at a time: what is taken, how each format is laid out, and the work."""
