"""XGBoost on Spark over the same dataset and split."""

from headrace.jobs._main import job_main

if __name__ == "__main__":
    job_main("baseline", __doc__)
