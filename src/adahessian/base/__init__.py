"""What everything else is built on: errors, log, dtypes, batches, shards."""
