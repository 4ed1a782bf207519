"""The logger ``adahessian``. It has no handler and no level, so applications configure it like any other logger."""

import logging
from functools import cache

logger = logging.getLogger("adahessian")

# Log a message the first time it occurs in this process.
warn_once, info_once = cache(logger.warning), cache(logger.info)
