"""Run the README's first snippet with an installed wheel and without packages that torch does not require."""

import re
import sys
from pathlib import Path


def main():
    # A module that is None in this table cannot be imported.
    sys.modules.update(dict.fromkeys(("numpy", "scipy", "sklearn", "matplotlib", "rich", "transformers", "tyro")))
    import torch

    import adahessian

    root = Path(__file__).parents[1]
    if Path(adahessian.__file__).is_relative_to(root / "src"):
        sys.exit("adahessian is imported from src. Install the wheel first.")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    loader = [(torch.randn(16, 20), torch.randint(10, (16,)))] * 20

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    before = loss_fn(model, loader[0]).item()
    snippet = re.search(r"^```python\n(.*?)^```$", (root / "README.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    exec(snippet, {"model": model, "loader": loader, "loss_fn": loss_fn})
    after = loss_fn(model, loader[0]).item()
    print(f"adahessian {adahessian.__version__}: the loss fell from {before:.3f} to {after:.3f}")
    sys.exit(not after < before)


if __name__ == "__main__":
    main()
