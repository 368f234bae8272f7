"""A real Slurm on one machine, a controller and nodes in namespaces, which runs the scripts of the guide."""
