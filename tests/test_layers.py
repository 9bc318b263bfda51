"""The import direction between the modules of the package, as docs/ and the design state it.

Imports under TYPE_CHECKING do not count: they name a type and create no dependency at run time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import retainzfs

pytestmark = pytest.mark.pure

PACKAGE = Path(retainzfs.__file__).parent

# Lowest first. A module imports from lower layers only; a package is one module here.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(layer.split())
    for layer in (
        "errors",
        "_zio failpoints mounts processes",
        "layout lifetimes",
        "asking",
        "hints",
        "hooks",
        "device",
        "zone inodes replay history sightings",
        "zones",
        "maps",
        "namespace placement journal streams",
        "chronicle",
        "evaluation",
        "trouble mending backup config planning",
        "lanes extents consistency contexts",
        "reader scrub",
        "stream membership",
        "forecast",
        "completion",
        "reaping committer",
        "retention",
        "generations",
        "copying recovery",
        "reclaim",
        "admitting compaction",
        "core",
        "removal",
        "names",
        "attributes observe",
        "volume",
        "control",
        "fs",
        "mkfs fsck unmounting",
        "repair replay_target recording",
        "volume_replay",
        "session",
        "mounting",
        "bench",
        "cli",
        "__main__",
    )
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# Outside packages, and who may import them: FUSE stays in the adapter, and what is pure neither
# waits nor touches a descriptor.
FUSE_ROOMS = {"fs", "control", "session", "bench"}
PURE = {
    *("errors", "layout", "lifetimes", "zone", "zones", "placement", "inodes", "maps", "namespace"),
    *("consistency", "config", "chronicle", "history", "sightings", "streams", "contexts"),
    "membership",
    *("forecast", "completion", "reaping", "retention", "generations"),
}
IMPURE = {"trio", "pyfuse3", "subprocess", "socket", "threading", "asyncio"}
IMPURE |= {"concurrent", "multiprocessing", "signal"}


class Imports(ast.NodeVisitor):
    """Collects the absolute names that a module imports when it runs."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        """Pass over what only a type checker reads."""
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """Collect `import a.b`."""
        self.found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Collect `from a.b import c` as a.b.c, which may be a module of a.b."""
        assert node.level == 0, f"line {node.lineno}: write imports with their full name"
        self.found |= {f"{node.module}.{alias.name}" for alias in node.names}


def imports(source: str) -> set[str]:
    """Return the absolute names that a source text imports."""
    visitor = Imports()
    visitor.visit(ast.parse(source))
    return visitor.found


def sources() -> Iterator[tuple[str, Path]]:
    """Yield each source file with the module (a top name of the package) it belongs to."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if module != "__init__":
            yield module, path


def siblings(found: set[str]) -> set[str]:
    """Return the modules of this package among imported names."""
    parts = [name.split(".") for name in found]
    return {p[1] for p in parts if p[0] == "retainzfs" and len(p) > 1 and p[1] in RANK}


def upward(module: str, found: set[str]) -> set[str]:
    """Return the modules that `module` may not import, among the names it imports."""
    return {other for other in siblings(found) - {module} if RANK[other] >= RANK[module]}


def test_every_module_has_a_layer() -> None:
    assert {module for module, _ in sources()} <= RANK.keys(), "give the new module a layer"


@pytest.mark.parametrize(("module", "path"), [pytest.param(*s, id=s[1].stem) for s in sources()])
def test_imports_point_down(module: str, path: Path) -> None:
    found = imports(path.read_text())
    above = upward(module, found)
    assert not above, f"{path.name} ({module}) imports {', '.join(sorted(above))}"
    outside = {name.split(".")[0] for name in found}
    assert module in FUSE_ROOMS or "pyfuse3" not in outside, f"{path.name} speaks FUSE"
    assert module not in PURE or not outside & IMPURE, f"{path.name} is not pure"


def test_the_check_sees_what_it_should() -> None:
    source = "\n".join(
        (
            "from __future__ import annotations",
            "from retainzfs import errors, volume",
            "import retainzfs.fs",
            "if TYPE_CHECKING:",
            "    from retainzfs.cli import main",
            "def late():",
            "    from retainzfs.core import Core",
        )
    )
    assert siblings(imports(source)) == {"errors", "volume", "fs", "core"}
    assert upward("core", imports(source)) == {"volume", "fs"}
    assert upward("fs", imports(source)) == set()
