"""The paper's figures 1 to 3."""
