"""The GPU-plan gate: everything that the Spark engine runs, as the RAPIDS plugin sees it."""
