"""Disjoint sets over the integers 0 to n - 1."""


class UnionFind:
    """Union-find with path halving.

    Args:
        n: Number of elements.
    """

    def __init__(self, n: int):
        self._parent = list(range(n))

    def find(self, a: int) -> int:
        """Return the representative of the set that contains `a`."""
        parent = self._parent
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        return a

    def union(self, a: int, b: int) -> None:
        """Merge the sets of `a` and `b`; the representative of `a` stays."""
        self._parent[self.find(b)] = self.find(a)
