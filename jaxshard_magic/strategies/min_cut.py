"""Minimum cut of a flow network: assign each node to the source side or the sink side at the least cost."""

from collections import defaultdict
from collections.abc import Hashable

Node = Hashable


class FlowNetwork:
    """Flow network between the nodes SOURCE and SINK."""

    SOURCE, SINK = "one end", "the other end"

    def __init__(self) -> None:
        self._residual: dict[Node, dict[Node, float]] = defaultdict(lambda: defaultdict(float))

    def add_cost(self, a: Node, b: Node, x: float) -> None:
        """Add `x` to the cost paid where `a` is on the source side and `b` on the sink side."""
        if x > 0 and a != b:
            self._residual[a][b] += x
            self._residual[b][a] += 0.0

    def min_cut(self) -> set[Node]:
        """Return the nodes on the source side of a minimum cut, the fewest nodes among all minimum cuts.

        Shortest augmenting paths (Edmonds and Karp 1972).
        """
        while True:
            predecessors = self._reachable_from_source()
            if self.SINK not in predecessors:
                return predecessors.keys() - {self.SOURCE}
            path, b = [], self.SINK
            while (a := predecessors[b]) is not None:
                path.append((a, b))
                b = a
            least = min(self._residual[a][b] for a, b in path)
            for a, b in path:
                self._residual[a][b] -= least
                self._residual[b][a] += least

    def _reachable_from_source(self) -> dict[Node, Node | None]:
        """Return the nodes reachable from SOURCE through residual capacity, each with its predecessor."""
        predecessors: dict[Node, Node | None] = {self.SOURCE: None}
        todo: list[Node] = [self.SOURCE]
        # `todo` grows in the loop: a search in breadth, so that the path found is a shortest one.
        for a in todo:
            for b, left in self._residual[a].items():
                if left > 0 and b not in predecessors:
                    predecessors[b] = a
                    todo.append(b)
                    if b == self.SINK:
                        return predecessors
        return predecessors
