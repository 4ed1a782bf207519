"""Sparse embeddings: AdaHessian for the dense layers and a first-order optimizer for the tables, as one optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, SparseAdam
from torch.optim.optimizer import Optimizer, StateDict
from torch.sparse import check_sparse_tensor_invariants

from adahessian import state as states
from adahessian.groups import param_groups
from adahessian.optimizer import AdaHessian
from adahessian.state import Group

SparseName = Literal["adagrad", "sparse_adam"]

# What can be set of each. The rest cannot be had with sparse gradients, or is shared with the dense layers.
_SETTINGS: dict[SparseName, tuple[str, ...]] = {
    "adagrad": ("lr_decay", "initial_accumulator_value", "eps"),
    "sparse_adam": ("betas", "eps"),
}


class DenseAndSparse(Optimizer):
    """AdaHessian for the dense layers of a model, Adagrad or SparseAdam for its sparse embeddings.

    So the paper trains DLRM: torch cannot differentiate the sparse gradient of an embedding a second time, and a table
    of which a batch touches a few rows wants an optimizer that touches no others. The weights of ``nn.Embedding`` and
    ``nn.EmbeddingBag`` with ``sparse=True`` are Adagrad's, all other parameters are AdaHessian's.

    It takes the place of an AdaHessian: :class:`adahessian.Curvature` and :class:`adahessian.GaussNewton` measure for
    it, and all that an AdaHessian can be asked, such as ``curvature_due``, it answers for the dense layers. Its groups
    are those of both, AdaHessian's first, so schedules reach both. One that sets learning rates takes one a group:
    ``OneCycleLR(optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], ...)``. torch clips no sparse
    gradients; ``clip_grad_norm_(optimizer.measured_parameters(), ...)`` clips the others.

    State is made at once, so that any checkpoint has all of it: move the model to its device first.

    Args:
        model: The model. Frozen parameters are taken too, for when they thaw.
        lr: Learning rate of the dense layers.
        sparse: What updates the embeddings: ``"adagrad"``, as in the paper, or ``"sparse_adam"``.
        sparse_lr: Learning rate of the embeddings; None takes torch's default, 0.01 for Adagrad, 0.001 for SparseAdam.
        sparse_settings: Other settings of the embeddings' optimizer: ``lr_decay``, ``initial_accumulator_value`` and
            ``eps`` of Adagrad, ``betas`` and ``eps`` of SparseAdam.
        decay_bias_and_norm: Whether vectors, scalars and the parameters of normalisation layers decay as well.
        **settings: All other arguments of :class:`adahessian.AdaHessian`. Embeddings do not decay.

    Attributes:
        dense: The AdaHessian.
        sparse: The Adagrad or SparseAdam.

    Raises:
        TypeError: If it is given anything else than a module, or a setting that it does not have.
        ValueError: If the model has no sparse embeddings or nothing else, or a setting is out of its range.

    Example:
        >>> import adahessian
        >>> model = nn.Sequential(nn.EmbeddingBag(1000, 8, sparse=True), nn.Linear(8, 1))
        >>> def loss_fn(model, words):
        ...     return model(words).square().mean()
        >>> optimizer = DenseAndSparse(model, lr=0.15, sparse_lr=0.01)
        >>> curvature = adahessian.Curvature(model, loss_fn, optimizer)
        >>> for words in torch.randint(1000, (3, 16, 4)):
        ...     _ = curvature.measure(words)
        ...     optimizer.zero_grad()
        ...     loss_fn(model, words).backward()
        ...     optimizer.step()
    """

    is_second_order = True

    dense: AdaHessian
    sparse: Optimizer

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.15,
        *,
        sparse: SparseName = "adagrad",
        sparse_lr: float | Tensor | None = None,
        sparse_settings: Mapping[str, Any] | None = None,
        decay_bias_and_norm: bool = True,
        **settings: Any,
    ) -> None:
        dense_groups, embeddings = _split(model, decay_bias_and_norm=decay_bias_and_norm)
        self.dense = AdaHessian(dense_groups, lr, **settings)
        self.sparse = _make_sparse(
            sparse,
            [{"params": embeddings, "sparse": True}],
            {} if sparse_lr is None else {"lr": sparse_lr},
            sparse_settings or {},
            maximize=self.dense.defaults["maximize"],
        )
        made = {**_started(self.dense), **_started(self.sparse)}
        super().__init__([*self.dense.param_groups, *self.sparse.param_groups], self.dense.defaults)
        self.state.update(made)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group: to AdaHessian, or with ``"sparse": True`` in it to the embeddings' optimizer.

        Raises:
            ValueError: If a setting of the group is out of its range, or a parameter is in another group already.
        """
        is_sparse = isinstance(param_group, dict) and param_group.setdefault("sparse", False)
        part = self.sparse if is_sparse else self.dense
        try:
            # It sees the groups of both while it checks the new one: no parameter may be in two.
            part.param_groups = self.param_groups
            part.add_param_group(param_group)
        finally:
            self._share()
        # Schedulers that cycle the momentum do so in every group. Adagrad has none, and does not look.
        param_group.setdefault("betas", self.defaults["betas"])

    def _share(self) -> None:
        """Let both parts work on the groups and the states that are seen from outside."""
        self.dense.param_groups = [group for group in self.param_groups if not group["sparse"]]
        self.sparse.param_groups = [group for group in self.param_groups if group["sparse"]]
        self.dense.state = self.sparse.state = self.state

    def __getattr__(self, name: str) -> Any:
        # Whoever measures a curvature, or asks for one, finds the AdaHessian here. Private names are not passed on, as
        # what torch keeps in those belongs to one optimizer; and while a copy is being made, ``dense`` is missing.
        if name == "dense" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dense, name)

    # The step --------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with both.

        Args:
            closure: Evaluates the model anew, with gradients enabled, calls ``backward`` and returns the loss.

        Raises:
            CurvatureError: If no curvature was ever measured, or an operation cannot be differentiated twice.
            RuntimeError: If a gradient is not of the kind that its optimizer takes, or a state does not fit.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Whatever can go wrong does so before anything is changed: here, and then in AdaHessian's step.
        for group in self.sparse.param_groups:
            for param in group["params"]:
                self._check_gradient(param, group)
        self.dense.step()
        for param in _parameters(self.sparse):
            if param.grad is not None and param.grad.requires_grad:
                # A gradient that keeps its graph keeps its parameter, which keeps its gradient: a cycle.
                param.grad = param.grad.detach()
        # Both make sparse tensors of what torch itself has made. Unless somebody has said whether to check those, torch
        # warns: so that is said, and is what it was.
        with check_sparse_tensor_invariants(check_sparse_tensor_invariants.is_enabled()):
            self.sparse.step()
        return loss

    def _check_gradient(self, param: Tensor, group: Group) -> None:
        if param.grad is None:
            return
        if isinstance(self.sparse, SparseAdam) and not param.grad.is_sparse:
            raise RuntimeError(
                f"SparseAdam takes sparse gradients only, but that of an embedding of shape {tuple(param.shape)} is "
                'dense, as it is where other layers share the weight: take sparse="adagrad", which takes both, or give '
                "the embedding sparse=False"
            )
        if param.grad.is_sparse and group.get("weight_decay"):
            raise RuntimeError(
                f"an embedding of shape {tuple(param.shape)} with sparse gradients cannot decay, but its group has "
                f"weight_decay={group['weight_decay']}: set it to 0"
            )

    # The state -------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state of both.

        Raises:
            ValueError: If it is another optimizer's, or does not fit the parameters; nothing is loaded then.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            if (changed := before(self, state_dict)) is not None:
                state_dict = changed

        for_dense, for_sparse = self._parts_of(state_dict)
        self._check_sparse(for_sparse)
        self.dense.load_state_dict(for_dense)  # which refuses what does not fit before it changes anything
        self.sparse.load_state_dict(for_sparse)
        dense_groups, sparse_groups = iter(self.dense.param_groups), iter(self.sparse.param_groups)
        self.param_groups = [next(sparse_groups if group["sparse"] else dense_groups) for group in self.param_groups]
        self.state = defaultdict(dict, {**self.dense.state, **self.sparse.state})
        self._share()

        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _parts_of(self, state_dict: StateDict) -> tuple[StateDict, StateDict]:
        """What a state dict has for AdaHessian and for the embeddings' optimizer."""
        saved = state_dict["param_groups"]
        own_form = [(group["sparse"], len(group["params"])) for group in self.param_groups]
        if [(group.get("sparse"), len(group["params"])) for group in saved] != own_form:
            raise ValueError(
                "this is the state of another optimizer or of another model: load one that DenseAndSparse has saved, "
                "for a model with the same parameters in the same groups"
            )
        of_embeddings = {key for group in saved if group["sparse"] for key in group["params"]}
        dense, sparse = (
            {
                "param_groups": [group for group in saved if group["sparse"] == is_sparse],
                "state": {k: v for k, v in state_dict["state"].items() if (k in of_embeddings) == is_sparse},
            }
            for is_sparse in (False, True)
        )
        return dense, sparse

    def _check_sparse(self, state_dict: StateDict) -> None:
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for param, key in zip(_parameters(self.sparse), keys, strict=True):
            own, new = self.state.get(param), state_dict["state"].get(key)
            if own and new and _shapes(own) != _shapes(new):
                raise ValueError(
                    f"the state of an embedding of shape {tuple(param.shape)} is {_shapes(new)}, but "
                    f"{type(self.sparse).__name__} needs {_shapes(own)}: load a checkpoint of this model, made with "
                    "the same choice of sparse"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "dense": self.dense, "sparse": self.sparse}


def _split(model: nn.Module, *, decay_bias_and_norm: bool) -> tuple[list[Group], list[tuple[str, Tensor]]]:
    """The groups of a model's dense layers, and the weights of its sparse embeddings, by name."""
    groups = param_groups(model, decay_bias_and_norm=decay_bias_and_norm)
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    embeddings = [(name, param) for group in groups for name, param in group["params"] if id(param) in tables]
    for group in groups:
        group["params"] = [(name, param) for name, param in group["params"] if id(param) not in tables]
    dense = [group for group in groups if group["params"]]
    if not embeddings:
        raise ValueError(
            "the model has no nn.Embedding or nn.EmbeddingBag with sparse=True: "
            "adahessian.AdaHessian(adahessian.param_groups(model)) takes all of it"
        )
    if not dense:
        raise ValueError(
            "the model has nothing but sparse embeddings, so there is nothing for AdaHessian: "
            "torch.optim.Adagrad(model.parameters()) takes all of it"
        )
    return dense, embeddings


def _make_sparse(
    name: SparseName, groups: list[Group], lr: dict[str, Any], settings: Mapping[str, Any], *, maximize: bool
) -> Optimizer:
    """The optimizer of the embeddings."""
    if name not in get_args(SparseName):
        raise ValueError(f"Invalid sparse value: {name!r}. It must be one of {', '.join(get_args(SparseName))}.")
    if unknown := sorted(set(settings) - set(_SETTINGS[name])):
        raise TypeError(
            f"sparse_settings has {', '.join(unknown)}, but of {name} it may have {', '.join(_SETTINGS[name])}; the "
            "learning rate is sparse_lr"
        )
    kind = Adagrad if name == "adagrad" else SparseAdam
    return kind(groups, **lr, **settings, maximize=maximize)


def _started(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state that an optimizer starts with, made now rather than at its first step, as Adagrad does.

    Libraries that checkpoint a fresh optimizer would have it made by a step with zero gradients, which are dense, and
    only if there is no state at all.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(optimizer, AdaHessian) and param.requires_grad:
                states.complete(optimizer.state[param], param, group)
            elif isinstance(optimizer, SparseAdam):
                averages = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[param] = {"step": 0, **averages}
    return dict(optimizer.state)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}
