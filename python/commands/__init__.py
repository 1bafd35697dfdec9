"""What the commands of the command line do: one file each, imported when it is called."""
