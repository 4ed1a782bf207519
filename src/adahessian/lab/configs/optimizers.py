"""Optimizers: the options of each, and the ranges that a sweep searches."""

from typing import ClassVar, Literal

from adahessian.lab.configs.checks import BelowOne, Count, Natural, NonNegative, Options, Positive, Share, UpToOne

Betas = tuple[BelowOne, BelowOne]


class OptimizerConfig(Options):
    """Options that all optimizers share."""

    title: ClassVar[str]  # name in tables and figures
    # What `adahessian sweep` searches: 10 means log-uniform from a tenth to ten times the default. The same for all
    # optimizers: learning rate and weight decay. Options whose default is 0 stay 0.
    searched: ClassVar[dict[str, float]] = {"lr": 10.0, "weight_decay": 10.0}

    lr: NonNegative  # Peak learning rate.
    clip_norm: Positive | None = None  # Maximum norm of the gradient. None disables clipping.


class Decaying(OptimizerConfig):
    """Options of optimizers with weight decay."""

    weight_decay: NonNegative = 0.0  # Weight decay: decoupled, except for SGD, Adam, Adagrad and RMSprop.
    decay_bias_and_norm: bool = True  # Also decay biases and parameters of normalization layers.


class SGD(Decaying):
    """Stochastic gradient descent."""

    title: ClassVar[str] = "SGD"
    momentum: BelowOne = 0.0  # Momentum.


class Adam(Decaying):
    """Adam."""

    title: ClassVar[str] = "Adam"
    betas: Betas = (0.9, 0.999)  # Decay rates of the momentum and of the second moment.
    eps: NonNegative = 1e-8  # Constant added to the denominator.


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    title: ClassVar[str] = "AdamW"


class Adagrad(Decaying):
    """Adagrad."""

    title: ClassVar[str] = "Adagrad"
    eps: NonNegative = 1e-8  # Constant added to the denominator.


class RMSprop(Decaying):
    """RMSprop."""

    title: ClassVar[str] = "RMSprop"
    alpha: BelowOne = 0.99  # Decay rate of the second moment.
    eps: NonNegative = 1e-8  # Constant added to the denominator.
    momentum: BelowOne = 0.0  # Momentum.


class Muon(Decaying):
    """Muon for matrices and kernels, AdamW for the rest. The learning rate is AdamW's (match_rms_adamw)."""

    title: ClassVar[str] = "Muon"
    momentum: BelowOne = 0.95  # Nesterov momentum of Muon.
    betas: Betas = (0.9, 0.999)  # Betas of AdamW, for embeddings, output layers and vectors.


class SOAP(Decaying):
    """SOAP, from the package pytorch_optimizer."""

    title: ClassVar[str] = "SOAP"
    betas: Betas = (0.95, 0.95)  # Decay rates of the momentum and of the second moment.
    precondition_every: Count = 10  # Steps between updates of the eigenbasis.


class Sophia(Decaying):
    """Sophia-H, from the package pytorch_optimizer."""

    title: ClassVar[str] = "Sophia"
    betas: Betas = (0.96, 0.99)  # Decay rates of the momentum and of the Hessian's diagonal.
    rho: Positive = 0.01  # Scale of the Hessian in the clipped ratio.
    curvature_every: Count = 10  # Steps between measurements.


class LBFGS(OptimizerConfig):
    """L-BFGS with strong Wolfe line search, for full-batch tasks."""

    title: ClassVar[str] = "L-BFGS"
    history: Count = 100  # Number of vector pairs to keep.


class _Measuring(Decaying):
    """Options of optimizers that measure curvature."""

    num_probes: Count = 1  # Hessian-vector products per measurement.
    curvature_every: Count = 1  # Steps between measurements of the curvature.
    curvature_warmup: Natural = 0  # Number of initial steps that always measure.
    batch_fraction: Share = 1.0  # Fraction of the batch to measure the curvature on.
    product_dtype: Literal["float32", "bfloat16"] = "float32"  # Precision of Hessian-vector products, when compiled.


class AdaHessian(_Measuring):
    """The paper's optimizer: a diagonal of the Hessian, measured at every step."""

    title: ClassVar[str] = "AdaHessian"
    betas: Betas = (0.9, 0.999)  # Decay rates of the momentum and of the squared curvature.
    eps: NonNegative = 1e-4  # Constant added to the denominator, on the scale of the loss.
    block_size: Count = 1  # Consecutive elements of a row that share one curvature value.
    hessian_power: UpToOne = 1.0  # Hessian power k.
    signed: bool = False  # Average signed values over a block instead of magnitudes.
    steady_start: bool = False  # Average the first measurement with its mean over each tensor.


class AdaHessianKron(_Measuring):
    """Kronecker factors of the Hessian, at AdamW's learning rate. Recommended."""

    title: ClassVar[str] = "AdaHessianKron"
    betas: Betas = (0.9, 0.95)  # Decay rates of the momentum and, per measurement, of the factors.
    block_size: Count = 256  # Largest number of rows or columns that share a factor.
    damping: Positive = 1e-2  # Minimum damping, relative to the mean eigenvalue.
    curvature_every: Count = 10  # Steps between measurements of the curvature.
    curvature_warmup: Natural = 50  # Number of initial steps that always measure.
    batch_fraction: Share = 0.25  # Fraction of the batch to measure the curvature on.


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adahessian-kron": AdaHessianKron,
    "adahessian": AdaHessian,
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "muon": Muon,
    "soap": SOAP,
    "sophia": Sophia,
    "lbfgs": LBFGS,
}
