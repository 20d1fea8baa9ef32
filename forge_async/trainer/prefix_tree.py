"""Texts -> a tree of what they have in common: every prefix that several of them begin with stands in it once.

A tree of nodes, each a stretch of tokens; a text is the tokens of the nodes from a root down to where it ends. The tree
depends on the texts alone, not on the order they are given in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

LEAST_SAVED = 8
"""A stretch that saves fewer tokens by being shared is copied: one more stretch costs attention about as much."""


@dataclass(eq=False)
class Node:
    """Tokens from ``start`` to before ``stop`` of every text below."""

    start: int
    stop: int
    text: int
    """One of the texts below, to read the tokens from."""
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """The texts that end here; only a node without children has any."""
    order: int = 0
    """Its place when the tree is walked parents first."""
    tokens: int = 0
    """Of this node and all below."""
    own_cost: float = 0.0
    """Of this node's tokens and the predictions that end here, in the unit of one token's linear layers."""
    cost: float = 0.0
    """Of this node and all below."""

    @property
    def length(self) -> int:
        return self.stop - self.start

    def walk(self) -> Iterator[Node]:
        """This node and all below, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


def prefix_tree(texts: Mapping[int, np.ndarray], share: bool = True, least_saved: int = LEAST_SAVED) -> list[Node]:
    """The roots of the texts' tree, numbered and in order.

    Args:
        texts: token ids int [T] by index; T at least 1.
        share: False gives each text a root of its own.
        least_saved: tokens that a shared stretch must save.
    """
    order = sorted(texts, key=lambda index: (np.asarray(texts[index], dtype=">i8").tobytes(), index))
    top = Node(0, 0, -1)
    path = [top]
    """From the top down to where the last text ends."""
    for position, index in enumerate(order):
        length = len(texts[index])
        depth = _common(texts[order[position - 1]], texts[index]) if position and share else 0
        below = path[-1]
        while path[-1].stop > depth:
            below = path.pop()
        if path[-1].stop < depth:
            upper = Node(below.start, depth, below.text, path[-1], [below])
            path[-1].children[-1] = upper
            below.start, below.parent = depth, upper
            path.append(upper)
        if length == depth and path[-1].ends:
            path[-1].ends.append(index)
            continue
        if path[-1].ends:  # the last text goes on: its end is a node without tokens
            path[-1].children.append(Node(depth, depth, path[-1].text, path[-1], ends=path[-1].ends))
            path[-1].ends = []
        leaf = Node(depth, length, index, path[-1], ends=[index])
        path[-1].children.append(leaf)
        path.append(leaf)
    _copy_small(top, least_saved)
    for number, node in enumerate(top.walk()):
        node.order = number
    for root in top.children:
        root.parent = None
    return top.children


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _copy_small(top: Node, least_saved: int) -> None:
    """Give the tokens of nodes that save too few to each of their children."""
    for node in reversed(list(top.walk())):
        children: list[Node] = []
        for child in node.children:
            if child.children and (len(child.children) - 1) * child.length < least_saved:
                for grandchild in child.children:
                    grandchild.start, grandchild.parent = child.start, node
                children.extend(child.children)
            else:
                children.append(child)
        node.children = children


def weigh(roots: list[Node], pair: float, predictions: Mapping[int, float]) -> None:
    """Fill in ``tokens``, ``own_cost`` and ``cost``.

    Args:
        pair: cost of one token attending to one.
        predictions: cost of each text's predictions.
    """
    for root in roots:
        for node in reversed(list(root.walk())):
            seen = node.length * node.start + node.length * (node.length + 1) / 2
            node.own_cost = node.length + pair * seen + sum(predictions[index] for index in node.ends)
            node.tokens = node.length + sum(child.tokens for child in node.children)
            node.cost = node.own_cost + sum(child.cost for child in node.children)
