"""A captured graph as a drawing: the text that Graphviz's `dot` reads."""

from __future__ import annotations

from .nodes import GraphNodes, Node

_LONGEST_NAME = 60  # characters; names of templates run to thousands


def to_dot(nodes: GraphNodes, title: str) -> str:
    """Return the graph in the DOT language; edges across which launches overlap are dashed."""
    lines = [f"digraph {_quoted(title)} {{", "  node [shape=box];"]
    lines += [f"  n{i} [label={_quoted(_label(i, node))}];" for i, node in enumerate(nodes.nodes)]
    for edge in nodes.edges:
        style = " [style=dashed, label=PDL]" if edge.programmatic else ""
        lines.append(f"  n{edge.source} -> n{edge.target}{style};")
    return "\n".join([*lines, "}", ""])


def short_name(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a kernel's name without the types it returns and takes, cut to `longest`."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    plain, depth = [], 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if depth == 0 and character != ")":
            plain.append(character)
    name = "".join(plain).strip() or name
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _label(index: int, node: Node) -> str:
    label = f"{index} {node.kind}"
    if node.name:
        label += f"\n{short_name(node.name)}"
    if node.grid is not None and node.block is not None:
        label += f"\n{_dims(node.grid)} of {_dims(node.block)}"
    return label


def _dims(dims: tuple[int, int, int]) -> str:
    return "×".join(str(size) for size in dims)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
