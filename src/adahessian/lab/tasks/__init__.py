"""Tasks: data, model, loss and evaluation. Each family has a module here and one of the same name in configs."""
