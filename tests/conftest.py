"""Settings that must be made before anything is imported."""

import os

import torch

if not torch.cuda.is_available():
    # Triton's interpreter runs the fused kernels on a CPU; Triton asks for it when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"
