"""Users x candidate items through the registered model; the best for each user."""

from headrace.jobs._main import job_main

if __name__ == "__main__":
    job_main("score", __doc__)
