"""The commands with ``--local``: what they do with the local tier of a host. Imported only if the option is passed."""
