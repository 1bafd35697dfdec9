"""An example of a package that adds a warehouse, a format of landing files, a stage and a model."""
