"""Shared helpers: errors, log, dtypes, batches, shards."""
