"""The laboratory: experiments with the library, behind the ``adahessian`` command. The library never imports it."""
