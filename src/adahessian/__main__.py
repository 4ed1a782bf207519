"""``python -m adahessian`` is the command, also under torchrun: ``torchrun -m adahessian train ...``."""

from importlib import import_module

if __name__ == "__main__":
    import_module("adahessian.lab.command").main()  # by name: no other file of the library knows the laboratory
