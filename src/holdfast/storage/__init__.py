"""Where bytes live. The only package that opens files."""
