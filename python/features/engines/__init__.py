"""Two engines that fit, transform and write the same bits."""
