"""Which part of the prefix tree goes into which row, and which rank computes it.

First-fit decreasing over subtrees: the heaviest goes first, to the row where it adds least. A subtree is cut, and the
path to its parts repeated, only where it fits nowhere whole. For several ranks, rows are as many as a multiple of the
ranks, and the heaviest is made as light as bisection finds (MULTIFIT). Ranks work side by side on rows of like cost.

Nothing is drawn at random, and the order in which sequences are given plays no part.
"""

from __future__ import annotations

import heapq
import math

from forge_async.trainer.prefix_tree import Node

ROUNDS = 8
"""Bisections for the lightest heaviest row."""


class RowPlan:
    """Nodes of one row."""

    def __init__(self) -> None:
        self.nodes: set[Node] = set()
        self.tokens = 0
        self.cost = 0.0

    def missing(self, node: Node) -> list[Node]:
        """The nodes above ``node`` that are not in the row yet."""
        above, parent = [], node.parent
        while parent is not None and parent not in self.nodes:
            above.append(parent)
            parent = parent.parent
        return above

    def added(self, node: Node) -> tuple[int, float]:
        """Tokens and cost by which the row grows with the subtree of ``node``."""
        path = self.missing(node)
        return node.tokens + sum(n.length for n in path), node.cost + sum(n.own_cost for n in path)

    def add(self, node: Node) -> None:
        tokens, cost = self.added(node)
        self.tokens += tokens
        self.cost += cost
        self.nodes.update(self.missing(node))
        self.nodes.update(node.walk())


def place(roots: list[Node], budget: int, most_cost: float = math.inf, most_rows: float = math.inf) -> list[RowPlan]:
    """Rows of at most ``budget`` tokens and ``most_cost``; one that is above holds a single text, which may be longer.

    Where ``most_rows`` do not suffice there are more.
    """
    rows: list[RowPlan] = []
    waiting = [(-root.cost, root.order, root) for root in roots]
    heapq.heapify(waiting)
    while waiting:
        _, _, node = heapq.heappop(waiting)
        best, least = None, math.inf
        for row in rows:
            tokens, cost = row.added(node)
            if cost < least and row.tokens + tokens <= budget and row.cost + cost <= most_cost:
                best, least = row, cost
        if best is None:
            empty = RowPlan()
            tokens, cost = empty.added(node)
            fits = tokens <= budget and cost <= most_cost and len(rows) < most_rows
            if node.children and not fits:
                for child in node.children:
                    heapq.heappush(waiting, (-child.cost, child.order, child))
                continue
            best = empty
            rows.append(empty)
        best.add(node)
    return rows


def balanced(roots: list[Node], budget: int, ranks: int) -> list[RowPlan]:
    """As few rows per rank as the budget needs, of costs as like as can be."""
    best = place(roots, budget)
    if ranks == 1 or not best:
        return best
    count = ranks * -(-len(best) // ranks)
    low, high = sum(root.cost for root in roots) / count, max(row.cost for row in best)
    for _ in range(ROUNDS):
        if high - low < 0.01 * high:
            break
        limit = (low + high) / 2
        found = place(roots, budget, limit, count)
        if len(found) > count:
            low = limit
            continue
        high = limit
        if duration(found, ranks) < duration(best, ranks):
            best = found
    return best


def duration(rows: list[RowPlan], ranks: int) -> float:
    """Cost from the first row to the last where ranks wait for each other after each."""
    return sum(sorted((row.cost for row in rows), reverse=True)[::ranks])


def deal(rows: list[RowPlan], ranks: int) -> list[list[RowPlan]]:
    """Rows by rank: the ``ranks`` heaviest side by side, then the next; the rank with least so far gets the first."""
    by_rank: list[list[RowPlan]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    order = sorted(range(len(rows)), key=lambda index: (-rows[index].cost, index))
    for first in range(0, len(order), ranks):
        lightest = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for index, rank in zip(order[first : first + ranks], lightest, strict=False):
            by_rank[rank].append(rows[index])
            load[rank] += rows[index].cost
    return by_rank
