"""The cheapest cut through a network: which of its nodes go to one side, and which to the other."""

from collections import defaultdict
from collections.abc import Hashable

Node = Hashable


class Network:
    """Nodes between the two ends ONE and OTHER. `cost(a, b, x)`: x is paid where `a` is on the side of ONE and `b` on
    that of OTHER."""

    ONE, OTHER = "one end", "the other end"

    def __init__(self) -> None:
        self._left: dict[Node, dict[Node, float]] = defaultdict(lambda: defaultdict(float))

    def cost(self, a: Node, b: Node, x: float) -> None:
        if x > 0 and a != b:
            self._left[a][b] += x
            self._left[b][a] += 0.0

    def cut(self) -> set[Node]:
        """The nodes on the side of ONE where as little as can be is paid, as few of them as that allows: by shortest
        augmenting paths (Edmonds and Karp 1972), their number that of the edges which are cut at most."""
        while True:
            reached = self._reached()
            if self.OTHER not in reached:
                return reached.keys() - {self.ONE}
            path, b = [], self.OTHER
            while (a := reached[b]) is not None:
                path.append((a, b))
                b = a
            least = min(self._left[a][b] for a, b in path)
            for a, b in path:
                self._left[a][b] -= least
                self._left[b][a] += least

    def _reached(self) -> dict[Node, Node | None]:
        """What can be reached from ONE, each with the node before it."""
        reached: dict[Node, Node | None] = {self.ONE: None}
        todo: list[Node] = [self.ONE]
        for a in todo:
            for b, left in self._left[a].items():
                if left > 0 and b not in reached:
                    reached[b] = a
                    todo.append(b)
                    if b == self.OTHER:
                        return reached
        return reached
