"""``python -m adahessian`` is the command, also for torchrun: ``torchrun -m adahessian train ...``."""

from adahessian.lab.command import main

if __name__ == "__main__":
    main()
