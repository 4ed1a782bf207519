"""Handwritten digits that scikit-learn contains, so that nothing has to be downloaded."""

import torch
from torch import nn

from adahessian.lab.configs.digits import DigitsConfig
from adahessian.lab.tasks.task import Env, TensorTask


class DigitsTask(TensorTask):
    """Classification of images of shape (N, 1, 8, 8), with values from 0 to 1."""

    def __init__(self, config: DigitsConfig, env: Env) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        examples = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.as_tensor(digits.target)
        # One fixed split: 1,297 training digits, 500 test digits.
        split = train_test_split(range(len(digits.target)), test_size=500, stratify=digits.target, random_state=0)
        training, test = (tuple(each[indices] for each in examples) for indices in split)
        super().__init__(config, env, training, test)

    def build_model(self) -> nn.Module:
        """Return a multilayer perceptron, or a small network in the style of the paper's ResNets."""
        if self.config.network == "mlp":
            layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
            return nn.Sequential(nn.Flatten(), nn.Sequential(*layers)).to(self.env.device)
        narrow = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        wide = nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        return nn.Sequential(*narrow, *wide, *head).to(self.env.device)
