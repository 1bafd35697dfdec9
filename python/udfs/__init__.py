"""Column functions that Spark lacks, each with a CPU and a GPU body: native/, docs/native.md.

- `library`: the C interface by ctypes, over host memory or a GPU's;
- `arrow`: the functions over Arrow arrays;
- `spark`: the same as Spark columns, by Java UDFs that the RAPIDS plugin runs on GPUs.
"""
