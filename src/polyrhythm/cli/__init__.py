"""The command line: one file per command, imported only when that command is given."""
