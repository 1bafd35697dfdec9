"""Work of the command line's commands: one file each, imported when the command is called."""
