"""Changes of a checkpoint that keep its optimizer states: names, rows, layers, experts, averages, dtypes.

An edit never loads the checkpoint. It describes each tensor of the result by a formula over stored tensors
(:mod:`rankless.edits.formulas`), and presents the result as one more checkpoint that can be read
(:mod:`rankless.formats.edited_reader`). So conversions write it into any format, and loads read it in any layout.
"""
