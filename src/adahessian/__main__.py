"""Entry point of ``python -m adahessian``. ``torchrun -m adahessian train ...`` works too."""

from importlib import import_module

if __name__ == "__main__":
    import_module("adahessian.lab.command").main()  # by name, so that the library never imports the lab itself
