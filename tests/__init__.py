"""Tests, by what they need: unit, spark, dist (Horovod ranks), dags (Airflow), e2e and fault (a whole day)."""
