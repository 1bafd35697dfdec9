"""Models of one logit a row, each from its paper: what `model.class` may name."""
