"""Published weights: versions that a training publishes, and that evaluations and inference engines follow.

A training calls ``publisher``, the other side calls ``follower``. The files are read by
:mod:`rankless.formats.weights`.
"""
