"""Reading of published weights: the versions of a weights directory, and each of them as a model in its files."""
