"""Published weights: versions that a training publishes, and that evaluations and inference engines follow.

``publisher`` is what a training calls, ``follower`` what the other side calls. The files are read by
:mod:`rankless.formats.weights`.
"""
