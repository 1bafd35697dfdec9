"""Judgement of data, models and lists: drift, gate, outcomes, and the report that shows them."""
