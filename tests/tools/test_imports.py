"""Which module of P3 imports which: none imports itself by way of others, and no room does.

Imports inside functions count, those for type checkers alone do not. A room is a folder of p3/, or one within such a
room; the modules beside the folders belong to none, as they are the ground and the roof of all.
"""

import ast
from pathlib import Path

import p3

ROOT = Path(p3.__file__).parents[1]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree, modules):
    """The modules of P3 that this program imports."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = ("%s.%s" % (node.module, alias.name) for alias in node.names)
            yield from (name if name in modules else node.module for name in inner)
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            nodes += node.orelse
        elif not isinstance(node, ast.expr):  # which imports nothing
            nodes += ast.iter_child_nodes(node)


def imports():
    paths = {name_of(path): path for path in ROOT.glob("p3/**/*.py")}
    return {
        module: {name for name in imported(ast.parse(path.read_text()), paths) if name in paths} - {module}
        for module, path in paths.items()
    }


def circle(graph):
    """One, as the names along it; empty if there is none."""
    left = dict(graph)
    while True:
        ends = [name for name, others in left.items() if not others & left.keys()]
        if not ends:
            break
        for name in ends:
            del left[name]
    path = []
    while left and (not path or path[-1] not in path[:-1]):
        path.append(min((left[path[-1]] if path else left.keys()) & left.keys()))
    return path[path.index(path[-1]) :] if path else []


def room_of(module, around):
    """The folder in `around` that the module is in; "" if it is in none."""
    parts, above = module.split("."), around.split(".")
    if parts[: len(above)] != above or len(parts) == len(above):
        return ""
    room = parts[: len(above) + 1]
    return ".".join(room) if Path(ROOT, *room).is_dir() else ""


def between_rooms(graph, around="p3"):
    between = {room_of(module, around): set() for module in graph}
    for module, others in graph.items():
        between[room_of(module, around)] |= {room_of(name, around) for name in others} - {room_of(module, around), ""}
    between.pop("")
    return between


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]


def test_no_module_imports_itself_by_way_of_others():
    graph = imports()
    assert graph["p3.cli"], "no imports are seen"
    assert circle(graph) == []


def test_no_room_imports_itself_by_way_of_others():
    rooms = between_rooms(imports())
    assert "p3.cluster" in rooms["p3.launch"], "no imports between rooms are seen"
    assert circle(rooms) == []


def test_nor_does_a_room_within_one_of_those_that_train():
    graph = imports()
    of_training = between_rooms(graph).keys() - {"p3.measure"}
    within = {around: between_rooms(graph, around) for around in of_training}
    assert "p3.torch.parameters" in within["p3.torch"]["p3.torch.device"], "no imports between them are seen"
    assert {around: circle(rooms) for around, rooms in within.items()} == dict.fromkeys(within, [])


def test_each_trainer_alone_imports_its_framework():
    frameworks = {"transformers": {"p3.transformers"}, "accelerate": {"p3.accelerate"}, "lightning": {"p3.lightning"}}
    found = {name: set() for name in frameworks}
    for path in ROOT.glob("p3/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for framework in {name.partition(".")[0] for name in names} & found.keys():
                found[framework].add(name_of(path))
    assert found == frameworks
    graph, roof = imports(), {"p3.transformers", "p3.accelerate", "p3.lightning"}
    assert {name for name, others in graph.items() if others & roof} == {"p3.transformers"}
