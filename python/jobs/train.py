"""Petastorm into Horovod on Spark: train the model with sharded embeddings, evaluate it, register it."""

from headrace.jobs._main import job_main

if __name__ == "__main__":
    job_main("train", __doc__)
