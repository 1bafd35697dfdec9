"""Column functions that Spark lacks, each with a CPU and a GPU body. None is needed yet: operators are plain columns."""
