"""Reports: a run, a checkpoint, or the difference of two, as one HTML page that needs no network.

``rankless report`` makes them, in one process, which only reads.
"""
