"""The rows of a day: which of them train, which validate, and what tables add to them."""
