"""Benchmarks of training steps, updates and memory."""
