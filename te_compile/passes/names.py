"""What a linear is called in the user's model.

Dynamo knows where each parameter came from, as Python text such as
``L['self']._modules['h']._modules['0']._parameters['weight']``, and in which module each operation ran, as
``L['self'].h.0``. Users write ``h.0``, in options and in their ``state_dict``. Three things stand in the way:

- Wrappers add components of their own (``_orig_mod`` of torch.compile and the like). Those names are reserved, so they
  go wherever they stand; ``module`` is a name that a model may really use, and stays.
- The root is a variable of the frame that was captured. The frame's own ``self`` is the model; a function that calls
  ``encoder`` and ``decoder`` needs both words to tell its linears apart.
- A weight may live elsewhere than where it is used, as that of a tied ``lm_head`` does. Then the place of use counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn
from torch.fx import Graph, Node

from te_compile.parameter_names import WRAPPERS

# The variables that hold "the model": a module's own, torch.compile's for a bare torch.nn module, and a closure's.
_MODEL_VARIABLES = {"self", "fn", "model"}
_PARAMETRIZED = re.compile(r"\bparametrizations\.(?P<name>[^.]+)\.original\d*$")
# Where a decorator's frame, that of ``def wrapper(*args, **kwargs)``, has the module whose method it wraps.
_FIRST_OF_A_TUPLE = re.compile(r"""^L\[(['"])(?P<variable>\w+)\1\]\[0\](?=[.\[])""")
_STORES = {"_modules", "_parameters", "_buffers"}
_TOKEN = re.compile(
    r"""^(?P<scope>[LG])(?=\[)                       # L[...] and G[...]: a local or global variable
      | \[ (?P<quote>['"]) (?P<key>.*?) (?P=quote) \]  # ['name']
      | \[ (?P<index>-?\d+) \]                         # [0]
      | \.? (?P<attribute>[^.\[\]'"()]+)               # .name
    """,
    re.VERBOSE,
)


def _components(path: str) -> tuple[str, list[str]] | None:
    """(root variable, components below it); None if ``path`` is more than a walk down attributes and items."""
    parts: list[tuple[str, bool]] = []
    at, scoped = 0, False
    while at < len(path):
        match = _TOKEN.match(path, at)
        if match is None or match.end() == at:
            return None
        at = match.end()
        if match["scope"]:
            scoped = True
            continue
        part = next(p for p in (match["key"], match["index"], match["attribute"]) if p is not None)
        parts.append((part, match["attribute"] is not None))
    if not scoped or not parts:
        return None
    root, *below = parts
    plumbing = WRAPPERS | {"__closure__", "cell_contents", "__dict__"}
    kept: list[str] = []
    before = ""
    for i, (part, is_attribute) in enumerate(below):
        is_store = part in _STORES and (is_attribute or before == "__dict__") and i + 1 < len(below)
        if part == "__self__":  # the object of a bound method, ``forward`` for one, that the object before holds
            kept = kept[:-1]
        elif not (part in plumbing or is_store or before == "__closure__"):
            kept.append(part)
        before = part
    return root[0], kept


def dotted(path: str, own: str = "") -> str:
    """A path of Dynamo's as users write it: ``L['self']._modules['h']._modules['0']`` → ``h.0``; "" if it has no name.

    own: where the captured frame has its own module, if that is not called ``self``: a variable, or ``args.0``.
    """
    found = _components(path)
    if found is None:
        return ""
    root, below = found
    if root in _MODEL_VARIABLES or root.startswith("__import_"):
        return ".".join(below)
    name = ".".join([root, *below])
    return "" if name == own else name.removeprefix(f"{own}.") if own else name


def owner(parameter: str) -> str:
    """The module that a parameter belongs to, for its ``weight``; any other parameter is a name of its own.

    What torch.nn.utils.parametrize put in a parameter's place goes by the name that the parameter had.
    """
    module, _, last = _PARAMETRIZED.sub(r"\g<name>", parameter).rpartition(".")
    parameter = f"{module}.{last}" if module else last
    return module if last == "weight" and module else parameter


def name_of_use(ran_in: str | None, aliases: Sequence[str]) -> str:
    """The name of a linear from the module it ran in (None: unknown) and the dotted names of its weight.

    The weight's owner, for one module may use several; unless it lies outside of the module that ran.
    """
    inside = [alias for alias in aliases if not ran_in or alias.startswith(f"{ran_in}.")]
    if inside:
        return owner(inside[0])
    return ran_in or ""


def _stack(node: Node) -> list[tuple[str, str]]:
    """(key, path) of each module around ``node``, outermost first; the key starts with the module's id."""
    return [(key, entry[0]) for key, entry in (node.meta.get("nn_module_stack") or {}).items()]


def _source(placeholder: Node | None) -> str:
    """Where Dynamo found what ``placeholder`` holds, as it writes it; "" if it does not know."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return ""
    return source.name() if callable(source.name) else source.name


def input_name(placeholder: Node, own: str | None = None) -> str:
    """What ``placeholder`` holds, as users write it: ``attention_mask`` or ``transformer.h.0.attn.bias``.

    own: ``own_variable`` of its graph, if it is known.
    """
    own = own_variable(placeholder.graph) if own is None else own
    name = dotted(_source(placeholder), own) or placeholder.name
    return name.removeprefix("kwargs.")  # where a call passes arguments on, they keep the name that its caller gave


def own_variable(graph: Graph) -> str:
    """Where the captured frame has its own module, a variable or the first of a tuple, as ``args.0`` in a method that a
    decorator wraps; "" for a function, or where no module is called.

    To know the last two takes a look at every node, so whoever names many things of one graph asks once.
    """
    outermost = (stack[0][1] for node in graph.nodes if (stack := _stack(node)))
    first = next(outermost, "")
    passed_on = _FIRST_OF_A_TUPLE.match(first)
    if passed_on and all(path.startswith(passed_on[0]) for path in outermost):
        return f"{passed_on['variable']}.0"
    # A frame's own module is no entry of its stacks: what stands there alone was called from a function.
    root, below = _components(first) or ("", [])
    return root if below else ""


def module_name(node: Node, weight: Node | None, own: str | None = None) -> str:
    """The name of the linear ``node``, whose weight is the root placeholder ``weight``, as far as Dynamo knows it.

    After a graph break Dynamo sees a part of the model alone, and names start there. own: ``own_variable`` of the
    node's graph, if it is known.
    """
    stack, own = _stack(node), own_variable(node.graph) if own is None else own
    ran_in = dotted(stack[-1][1], own) if stack else None
    source = dotted(_source(weight), own)
    return name_of_use(ran_in, [source] if source else []) or node.name


class KnownNames:
    """The names in a model that is at hand: right after graph breaks, and for weights that have several."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = {id(module): _plain(name) for name, module in model.named_modules()}
        self.aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.aliases.setdefault(id(parameter), []).append(_plain(name))

    def name(self, node: Node, parameter: Tensor | None) -> str | None:
        """The full name of the linear ``node``, None if neither its module nor its weight is the model's."""
        keys = [key.partition("@")[0] for key, _ in _stack(node)]
        ran_in = self.modules.get(int(keys[-1])) if keys and keys[-1].isdigit() else None
        return name_of_use(ran_in, self.aliases.get(id(parameter), [])) or None


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
