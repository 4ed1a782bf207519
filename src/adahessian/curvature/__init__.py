"""Everything that produces ``z * (H z)``: probes, products, the pass that measures, and when one is due."""
