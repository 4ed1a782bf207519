"""The search that found the learning rates of the contenders: ``python -m adahessian.lab.lr_search``.

It takes several minutes, so the demo keeps its outcome as constants. The test examples have no part in it.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import torch
from sklearn.model_selection import StratifiedKFold

from adahessian.lab.contenders import CONTENDERS, Contender
from adahessian.lab.digits import EPOCHS, train, training_and_test_examples
from adahessian.lab.threads import one_thread

FOLDS = 5
# Far from the seeds of the demo, 0 and up, so that no run there repeats one of these.
FIRST_SEED = 1000


def cross_validate(contender: Contender, lr: float) -> tuple[float, float]:
    """Try a learning rate on each fold of the training examples, each with a seed of its own.

    Returns:
        The accuracy on the fold left out and the training loss on all others, means over the folds.
    """
    examples, _ = training_and_test_examples()
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(examples.images, examples.labels)
    ends = []
    for fold, (others, left_out) in enumerate(folds):
        *_, end = train(
            replace(contender, lr=lr),
            seed=FIRST_SEED + fold,
            training=examples.take(torch.as_tensor(others)),
            held_out=examples.take(torch.as_tensor(left_out)),
            epochs=EPOCHS,
        )
        ends.append(end)
    return mean(end.accuracy for end in ends), mean(end.train_loss for end in ends)


def main() -> None:
    """Print the accuracy in cross-validation for each contender and learning rate, and which was best."""
    with one_thread():
        for contender in CONTENDERS:
            accuracies = {}
            for lr in contender.searched_lrs:
                accuracies[lr], train_loss = cross_validate(contender, lr)
                print(f"{contender.name:24} lr {lr:<7g} accuracy {accuracies[lr]:7.2%}  training loss {train_loss:.4f}")
            print(f"{contender.name:24} lr {max(accuracies, key=accuracies.__getitem__):<7g} is best", flush=True)


if __name__ == "__main__":
    main()
