"""Valid values of options, as types. Messages name the option as it is typed."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from typing_extensions import dataclass_transform  # a dependency of torch

from adahessian.lab.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The valid values of an option: in words, and as a test that infinity and NaN fail."""

    wanted: str
    has: Callable[[float], bool]


def minimum(least: float) -> Range:
    """Return the range of finite numbers from ``least``."""
    return Range(f"{least} or more", lambda value: least <= value < math.inf)


Natural = Annotated[int, minimum(0)]
Count = Annotated[int, minimum(1)]
NonNegative = Annotated[float, minimum(0)]
Positive = Annotated[float, Range("a value above 0", lambda value: 0 < value < math.inf)]
BelowOne = Annotated[float, Range("a value of at least 0 and below 1", lambda value: 0 <= value < 1)]
UpToOne = Annotated[float, Range("a value from 0 to 1", lambda value: 0 <= value <= 1)]
Share = Annotated[float, Range("a value above 0 and at most 1", lambda value: 0 < value <= 1)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Options:
    """A base that makes frozen dataclasses, and checks all values but None against the ranges in their annotations."""

    _ranges: ClassVar[list[tuple[str, Range]]]

    def __init_subclass__(cls) -> None:
        doc = cls.__doc__
        dataclass(frozen=True, kw_only=True)(cls)
        cls.__doc__ = doc  # Without a docstring, dataclass() would set it to the signature.
        hints = get_type_hints(cls, include_extras=True)
        cls._ranges = [(name, each) for name, hint in hints.items() for each in _ranges_in(hint)]

    def __post_init__(self) -> None:
        for name, valid in self._ranges:
            value = getattr(self, name)
            for each in value if isinstance(value, (tuple, list)) else (value,):  # lists are from run files
                if each is not None and not valid.has(each):
                    raise ConfigError(f"--{name.replace('_', '-')} {each} is invalid. Pass {valid.wanted}.")


def _ranges_in(hint: Any) -> Iterator[Range]:
    """Yield the ranges of a type and of its parts, as in ``tuple[BelowOne, BelowOne]`` and ``Count | None``."""
    yield from (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range))
    for part in get_args(hint):
        yield from _ranges_in(part)
