"""Disjoint sets over the numbers 0 to n - 1."""


class UnionFind:
    """`find(a)` names the set of `a`; `union(a, b)` joins two sets."""

    def __init__(self, n: int):
        self._parent = list(range(n))

    def find(self, a: int) -> int:
        parent = self._parent
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        return a

    def union(self, a: int, b: int) -> None:
        self._parent[self.find(b)] = self.find(a)
