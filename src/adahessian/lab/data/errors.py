"""What is said of data that is not as it should be."""

from __future__ import annotations


class DataError(Exception):
    """Data that is missing, truncated or not in its owner's format. The message says which file, and what to do."""
