"""What a training step costs, beside other optimizers, in one run."""
