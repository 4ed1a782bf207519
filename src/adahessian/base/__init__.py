"""Shared helpers: errors, log, precision, batches, shards."""
