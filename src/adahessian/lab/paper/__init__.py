"""``adahessian paper``: every table and figure of the paper, from the runs at hand."""
