"""Algorithm 1 on tensors: schedule, probes, shapes, state, update."""
