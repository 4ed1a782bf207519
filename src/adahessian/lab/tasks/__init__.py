"""What the paper trains, each task with its model, its data and its metric."""
