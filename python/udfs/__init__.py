"""Column functions that Spark lacks, each with a CPU and a GPU body. None yet: all operators are plain columns."""
