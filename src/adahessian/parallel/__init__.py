"""DistributedDataParallel, FSDP2, and the mean over ranks and micro-batches."""
