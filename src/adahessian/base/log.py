"""The logger ``adahessian``.

It has no handler and no level, so applications configure it like any other logger. By default, Python prints warnings
to standard error and drops info messages.
"""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger("adahessian")


@cache
def warn_once(message: str) -> None:
    """Log a warning the first time it occurs in this process."""
    logger.warning(message)


@cache
def info_once(message: str) -> None:
    """Log an info message the first time it occurs in this process."""
    logger.info(message)
