"""Writing the dataset: what goes into which file, and one writer for each kind of rows."""
