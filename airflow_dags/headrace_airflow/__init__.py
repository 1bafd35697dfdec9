"""Parts of headrace's DAGs, which headrace_dags.py makes.

    settings       where the pipelines' environment is: variables of Airflow's processes
    pipelines      the files of pipelines, and the faults of their specs
    connections    Spark's master, secrets, and the environment of what is started
    commands       a command as a process of the task, as a driver or as a pod; triggers; exit codes
    cluster, pods  applications of Spark's master and of YARN; pods of Kubernetes
    operators      the operators of the tasks
    notify         messages about a day

Imported by the scheduler's processes each time they read a DAG file, so nothing heavy comes in here: no pyspark, no
torch, nothing of the package `headrace`, which lives in another environment, but for four files of it that need no
other: the list of stages, the exit codes, how secrets are handed over and how the pipelines' files are read.
"""
