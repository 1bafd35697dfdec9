"""BigQuery as a warehouse of headrace."""
