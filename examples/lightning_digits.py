"""Train on handwritten digits with Lightning, on a CPU, in a few seconds.

pip install "adahessian[lightning]" scikit-learn
python lightning_digits.py --epochs 5
"""

import argparse

import torch
from lightning import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import adahessian
from adahessian.integrations.lightning import CurvatureCallback


class Digits(LightningModule):
    """A small convolutional network. Only its optimizer is specific to AdaHessian."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        first = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU(), nn.Flatten()
        self.model = nn.Sequential(*first, *second, nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10))

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the accuracy."""
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        """Measure the curvature at each of the first 20 steps, then at every tenth step."""
        groups = adahessian.param_groups(self)
        optimizer = adahessian.AdaHessian(groups, lr=self.lr, curvature_every=10, curvature_warmup=20)
        schedule = OneCycleLR(optimizer, max_lr=self.lr, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train, then print the accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    callback = CurvatureCallback(batch_fraction=0.25)  # the only addition to the Trainer
    trainer = Trainer(
        max_epochs=epochs, callbacks=callback, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=len(test)))
    print(f"test accuracy {trainer.callback_metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
