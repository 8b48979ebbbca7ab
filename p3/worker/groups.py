"""Layers in few groups: keys by the first components of their names, so that a net of any depth makes about ten.

`features.0.weight` and `features.3.bias` are of one group as long as `features` has room for no more; the blocks of a
deep net, which are numbered, are split into runs: `transformer.h.0-2`, `transformer.h.3-5`. No I/O.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

MOST = 10

_Path = Tuple[str, ...]


class _Group:
    def __init__(self, title: _Path, depth: int, paths: List[_Path]) -> None:
        self.title = title
        self.depth = depth  # components that all of its paths share, or that a run has split by
        self.paths = paths  # each once, in their order

    def split(self, room: int) -> List[_Group]:
        """Into at most `room` groups; itself alone where nothing can be split."""
        below: Dict[_Path, List[_Path]] = {}
        for path in self.paths:
            below.setdefault(path[: self.depth + 1], []).append(path)
        if len(below) < 2:
            deepest = all(len(path) <= self.depth + 1 for path in self.paths)
            return [self] if deepest else _Group(next(iter(below)), self.depth + 1, self.paths).split(room)
        if len(below) <= room:
            return [_Group(title, self.depth + 1, paths) for title, paths in below.items()]
        numbered = [title for title in below if title[-1].isdigit()]
        others = len(below) - len(numbered)
        if len(numbered) < 2 or room - others < 2:
            return [self]
        runs = _runs(numbered, room - others)
        made = [_Group(title, self.depth + 1, below[title]) for title in below if title not in numbered]
        for run in runs:
            last = "" if len(run) == 1 else "-" + run[-1][-1]
            paths = [path for title in run for path in below[title]]
            made.append(_Group((*run[0][:-1], run[0][-1] + last), self.depth + 1 if len(run) == 1 else -1, paths))
        return made


def _runs(titles: Sequence[_Path], most: int) -> List[Sequence[_Path]]:
    """Neighbours together, in runs of about one length."""
    bounds = [len(titles) * number // most for number in range(most + 1)]
    return [titles[begin:end] for begin, end in zip(bounds, bounds[1:]) if end > begin]


def groups(names: Sequence[str], most: int = MOST) -> Dict[str, str]:
    """The group of each name. The last component of a name (`weight`, `bias`) makes no groups, unless it is all."""
    path_of = {name: tuple(name.split("."))[:-1] or (name,) for name in names}
    found = [_Group((), 0, list(dict.fromkeys(path_of.values())))] if names else []
    while True:
        largest_first = sorted((one for one in found if one.depth >= 0), key=lambda one: -len(one.paths))
        for one in largest_first:
            parts = one.split(most - len(found) + 1)
            if len(parts) > 1:
                found[found.index(one) : found.index(one) + 1] = parts
                break
        else:
            break
    title_of = {path: _title(one) for one in found for path in one.paths}
    return {name: title_of[path] for name, path in path_of.items()}


def _title(group: _Group) -> str:
    """Of one that was never split: as far as its paths agree."""
    if group.title:
        return ".".join(group.title)
    common = list(group.paths[0])
    for path in group.paths:
        while common and list(path[: len(common)]) != common:
            common.pop()
    return ".".join(common) or "all"
