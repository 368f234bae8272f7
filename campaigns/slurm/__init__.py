"""A real Slurm on one machine, a controller and nodes in namespaces, which runs the scripts of the guide.

It needs root, ``iproute2`` and the sources of Debian 12. A job that goes wrong is printed with its output and the
last events of its training. Seen with Slurm 22.05: ``srun`` does not take ``--cpus-per-task`` from the job, so the
scripts of the guide pass it on. ``scancel --signal=TERM 17_1``, with the number of an array, prints an error about
the elements that wait; with the job and the step (``18.0``) it does not.
"""
