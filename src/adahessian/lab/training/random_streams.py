"""Random streams that depend on a key alone, so that a resumed run draws the same numbers."""

import hashlib

import torch


def random_stream(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator, which yields the same stream each time for the same key: ("order", seed, epoch)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 11)  # every backend takes 53 bits
