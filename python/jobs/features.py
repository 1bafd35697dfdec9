"""Events to the dataset: fit the workflow on the training range, transform, write Parquet."""

from headrace.jobs._main import job_main

if __name__ == "__main__":
    job_main("features", __doc__)
