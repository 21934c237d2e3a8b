"""A model of a power cut: every state of a folder that one can leave, from the disk operations of some work.

It takes a file system at its word and no further: what was synced is there, and all else is there or not, each for itself.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from vitlab.core import fsio

Recorded = list[tuple[fsio.Operation, Path, bytes]]  # with what the file held when it was synced
State = dict[str, bytes]  # the content of every file, by its place under the root


def recorded(work: Callable[[], object]) -> Recorded:
    """The operations of `work`, which it carries out."""
    seen: list[tuple[fsio.Operation, Path]] = []
    contents: dict[Path, bytes] = {}

    def listener(operation: fsio.Operation, path: Path) -> None:
        if operation == "fsync" and path.is_file():
            contents[path] = path.read_bytes()
        seen.append((operation, path))

    with fsio.intercept(listener):
        work()
    return [(operation, path, contents.get(path, b"")) for operation, path in seen]


def lay_out(state: State, place: Path) -> Path:
    """The state as a real folder."""
    place.mkdir(parents=True)
    for name, content in state.items():
        file = place / name.removeprefix("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return place


@dataclasses.dataclass
class Node:
    """A file with the contents it may have after a cut, or a folder with its entries."""

    contents: list[bytes] | None = None
    entries: dict[str, "Node"] = dataclasses.field(default_factory=dict[str, "Node"])


Change = tuple[Node, str, Node | None, str | None]  # folder, name, what stands there then, the name it had before


class Disk:
    """What a file system promises, and no more: a synced file has its content, a synced folder its entries.

    Everything else is there or not, each for itself.
    """

    def __init__(self, root: Path) -> None:
        self.top = self._read(root)
        self.paths: dict[Path, Node] = {}  # as the running system sees it
        self._index(root, self.top)
        self.pending: list[Change] = []  # seen by the running system, and not synced yet

    def _read(self, path: Path) -> Node:
        if path.is_dir():
            return Node(None, {inner.name: self._read(inner) for inner in path.iterdir()})
        return Node([path.read_bytes()])

    def _index(self, path: Path, node: Node) -> None:
        self.paths[path] = node
        for name, inner in node.entries.items():
            self._index(path / name, inner)

    def follow(self, operations: list[tuple[str, Path, bytes]]) -> Iterator[dict[str, bytes]]:
        """Every state that a cut before one of the operations, or after the last, can leave."""
        yield from self.states()
        for operation, path, content in operations:
            self._apply(operation, path, content)
            yield from self.states()

    def _apply(self, operation: str, path: Path, content: bytes) -> None:
        folder = self.paths.get(path.parent)
        if operation in ("mkdir", "create"):
            assert folder is not None
            node = self.paths[path] = Node(None if operation == "mkdir" else [b""])
            self.pending.append((folder, path.name, node, None))
        elif operation == "write":
            self.paths[path].contents = [b"", content[: len(content) // 2], content]
        elif operation == "rename":
            assert folder is not None
            temporary = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
            (source,) = (old for old in self.paths if old.parent == path.parent and temporary.fullmatch(old.name))
            node = self.paths.pop(source)
            self._move(source, path)
            self.paths[path] = node
            self.pending.append((folder, path.name, node, source.name))
        elif operation == "remove":
            assert folder is not None
            self.pending.append((folder, path.name, None, None))
            del self.paths[path]
        elif operation == "fsync":
            node = self.paths[path]
            if node.contents is not None:
                node.contents = [content]
            else:
                for change in [change for change in self.pending if change[0] is node]:
                    self._put(node.entries, change)
                    self.pending.remove(change)

    def _move(self, source: Path, target: Path) -> None:
        for old in [path for path in self.paths if source in path.parents]:
            self.paths[target / old.relative_to(source)] = self.paths.pop(old)

    @staticmethod
    def _put(entries: dict[str, Node], change: Change) -> None:
        _, name, node, before = change
        if before is not None:
            entries.pop(before, None)
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node

    def states(self) -> Iterator[dict[str, bytes]]:
        for kept in itertools.product((False, True), repeat=len(self.pending)):
            extra: dict[int, list[Change]] = {}
            for change in itertools.compress(self.pending, kept):
                extra.setdefault(id(change[0]), []).append(change)
            yield from self._choices("", self.top, extra)

    def _choices(self, place: str, node: Node, extra: dict[int, list[Change]]) -> Iterator[dict[str, bytes]]:
        if node.contents is not None:
            for content in node.contents:
                yield {place: content}
            return
        entries = dict(node.entries)
        for change in extra.get(id(node), []):
            self._put(entries, change)
        inner = [list(self._choices(f"{place}/{name}", child, extra)) for name, child in entries.items()]
        for chosen in itertools.product(*inner):
            yield {path: content for part in chosen for path, content in part.items()}
