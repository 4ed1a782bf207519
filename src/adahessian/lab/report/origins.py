"""Where the numbers of a section come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adahessian.lab.report.costs import hardware
from adahessian.lab.report.groups import Group
from adahessian.lab.report.tables import differ_in_conditions
from adahessian.lab.report.wording import group_title, under


def origins(groups: Sequence[Group]) -> list[str]:
    """Conditions, hardware, versions, commits, dates, seeds and commands of runs, each said once."""
    runs = [run for group in groups for run in group.runs]
    sources = [source for run in runs for source in run.provenance]
    dates = sorted(source["date"] for source in sources)
    return [
        f"Computed {_once(under(group.conditions) for group in groups)}; {_once(hardware(run) for run in runs)}.",
        "Versions: "
        + _once(
            ", ".join(f"{package} {version}" for package, version in source["versions"].items()) for source in sources
        )
        + ".",
        f"Commits: {_once(str(source['commit'] or 'unknown') for source in sources)}.",
        f"Begun between {dates[0]} and {dates[-1]}.",
        *_seeds(groups),
        *(
            f"Of {group_title(group, with_conditions=True)} there are several runs with seed "
            f"{' '.join(map(str, group.repeated))}: the latest counts."
            for group in groups
            if group.repeated
        ),
        *(f"Command: {command}" for command in dict.fromkeys(source["command"] for source in sources)),
    ]


def _seeds(groups: Sequence[Group]) -> list[str]:
    seeds = [" ".join(str(run.seed) for run in group.runs) for group in groups]
    if len(set(seeds)) == 1:
        return [f"Seeds of {'each' if len(seeds) > 1 else group_title(groups[0], with_conditions=False)}: {seeds[0]}."]
    named = differ_in_conditions(groups)
    return [
        f"Seeds of {group_title(group, with_conditions=named)}: {own}."
        for group, own in zip(groups, seeds, strict=True)
    ]


def _once(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))
