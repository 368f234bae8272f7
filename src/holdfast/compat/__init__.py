"""The calls of other systems, under their own names: see NOTICE."""
