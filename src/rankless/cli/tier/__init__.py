"""The commands with ``--local``: their work on the local tier of a host. Imported only if the option is passed."""
