"""The newest day's scores in stores of keys and values, for services that read one user's items."""
