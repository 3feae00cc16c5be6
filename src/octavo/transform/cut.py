"""The cheapest set of values from which others can be computed: a minimum cut of vertices in a graph of data flow.

PyTorch's AOTAutograd chooses by such a cut what a backward pass saves ("min-cut rematerialization").
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping


def minimum_cut[T](
    costs: Mapping[T, float], edges: Iterable[tuple[T, T]], inputs: Collection[T], outputs: Collection[T]
) -> list[T]:
    """The vertices of the smallest total cost that are on every path from an input to an output.

    Of several such sets, it is that nearest to the outputs, so that the fewest values are computed again.

    Args:
        costs: The cost of each vertex, positive and finite.
        edges: Pairs of a vertex and one that is computed from it.
        inputs: The vertices where paths begin; they may be in the cut, as outputs may.
        outputs: The vertices where paths end.

    >>> costs = {"x": 4, "tanh": 4, "mask": 1, "y": 4}
    >>> minimum_cut(costs, [("x", "tanh"), ("x", "mask"), ("tanh", "y"), ("mask", "y")], ["x"], ["tanh", "mask", "y"])
    ['x']
    """
    number = {vertex: n for n, vertex in enumerate(costs)}
    begin, end = 2 * len(number), 2 * len(number) + 1  # a vertex is the arc from 2n to 2n + 1
    arcs: list[dict[int, float]] = [{} for _ in range(end + 1)]

    def connect(a: int, b: int, capacity: float) -> None:
        arcs[a][b] = arcs[a].get(b, 0) + capacity
        arcs[b].setdefault(a, 0)

    for vertex, n in number.items():
        connect(2 * n, 2 * n + 1, costs[vertex])
    for a, b in edges:
        connect(2 * number[a] + 1, 2 * number[b], math.inf)
    for vertex in inputs:
        connect(begin, 2 * number[vertex], math.inf)
    for vertex in outputs:
        connect(2 * number[vertex] + 1, end, math.inf)
    while path := _augmenting_path(arcs, begin, end):
        flow = min(arcs[a][b] for a, b in path)
        for a, b in path:
            arcs[a][b] -= flow
            arcs[b][a] += flow
    reaches = {end}
    queue = deque(reaches)
    while queue:
        b = queue.popleft()
        found = [a for a in arcs[b] if a not in reaches and arcs[a][b] > 0]
        reaches.update(found)
        queue.extend(found)
    return [vertex for vertex, n in number.items() if 2 * n + 1 in reaches and 2 * n not in reaches]


def _augmenting_path(arcs: list[dict[int, float]], begin: int, end: int) -> list[tuple[int, int]]:
    """The arcs of a shortest path with capacity left; empty if there is none."""
    came = {begin: begin}
    queue = deque([begin])
    while queue and end not in came:
        a = queue.popleft()
        for b, left in arcs[a].items():
            if left > 0 and b not in came:
                came[b] = a
                queue.append(b)
    path: list[tuple[int, int]] = []
    at = end
    while at in came and at != begin:
        path.append((came[at], at))
        at = came[at]
    return path
