"""An example of a package that adds a warehouse and a format of landing files."""
