"""The Spark engine: fit, transform and write as Spark plans, which GPUs can run whole."""
