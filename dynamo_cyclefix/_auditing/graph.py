"""Graph functions on indices: what refers to what, as lists of successors."""

import collections
import gc
from collections.abc import Callable, Iterable, Iterator

Edges = list[list[int]]


def references(objects: list[object]) -> Edges:
    index = {id(obj): i for i, obj in enumerate(objects)}
    return [
        [index[id(target)] for target in gc.get_referents(obj) if id(target) in index]
        for obj in objects
    ]


def reachable(followed: Callable[[int], Iterable[int]], starts: Iterable[int]) -> set[int]:
    """The nodes that can be reached, going from each to those that `followed` gives."""
    reached = set(starts)
    todo = list(reached)
    while todo:
        new = set(followed(todo.pop())) - reached
        reached |= new
        todo += new
    return reached


def components(edges: Edges, nodes: set[int]) -> list[set[int]]:
    """The strongly connected components that have a cycle (Tarjan 1972, without recursion)."""
    found: list[set[int]] = []
    order: dict[int, int] = {}  # when each node was first seen
    low: dict[int, int] = {}  # the earliest node on the stack that it leads back to
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in nodes:
        path: list[tuple[int, Iterator[int]]] = []
        entered = None if root in order else root
        while entered is not None or path:
            if entered is not None:
                order[entered] = low[entered] = len(order)
                stack.append(entered)
                on_stack.add(entered)
                path.append((entered, iter(edges[entered])))
                entered = None
            node, targets = path[-1]
            for target in targets:
                if target in nodes and target not in order:
                    entered = target
                    break
                if target in on_stack:
                    low[node] = min(low[node], order[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    component: set[int] = set()
                    while node not in component:
                        component.add(stack.pop())
                    on_stack -= component
                    if len(component) > 1 or node in edges[node]:
                        found.append(component)
    return found


def shortest_cycle(edges: Edges, start: int, nodes: set[int]) -> list[int]:
    """The nodes of a shortest cycle inside `nodes`, from `start` to `start`."""
    came_from: dict[int, int] = {}
    todo = collections.deque([start])
    while start not in came_from:
        node = todo.popleft()
        for target in edges[node]:
            if target in nodes and target not in came_from:
                came_from[target] = node
                todo.append(target)
    path = [start, came_from[start]]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def reversed_edges(edges: Edges) -> Edges:
    """The same graph, with every edge the other way round."""
    back: Edges = [[] for _ in edges]
    for source, targets in enumerate(edges):
        for target in targets:
            back[target].append(source)
    return back


def shortest_path(edges: Edges, start: int, ends: Callable[[int], bool]) -> list[int] | None:
    """The nodes of a shortest path from `start` to a node that `ends` accepts; None without one."""
    came_from = {start: start}
    todo = collections.deque([start])
    while todo:
        node = todo.popleft()
        if ends(node):
            path = [node]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path[::-1]
        for target in edges[node]:
            if target not in came_from:
                came_from[target] = node
                todo.append(target)
    return None
