"""The Arrow engine: from the data files of the lake to the files of the dataset; Spark only schedules its tasks."""
