"""Find every linear of a captured graph, in whatever form the model wrote it.

A linear is a product of an activation with a parameter, or with a matrix that is made from one. Some forms are lowered
as they stand: ``F.linear``, a product of two matrices (``x @ weight.T``, ``torch.mm(x, weight)`` and their like) and
``addmm(bias, x, weight)``. The weight may be behind transpositions: te::linear reads both layouts, so these are left
without a reader. Products with the weight on the left or with more added than a bias, einsums and their like,
convolutions, batched and grouped products are lowered if they are linears in disguise; each has a file of its own.
Every other product with a parameter is recorded too, so that no report is silent about it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.nn import Parameter

from te_compile.flat_parameters import parameter_of
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.batched_einsums import batched_einsum_site
from te_compile.passes.batched_linears import batched_site, is_batched_product
from te_compile.passes.broadcast_products import broadcast_site, is_plain_product
from te_compile.passes.captured_nodes import argument, called, is_tensor, rows_of, size_hint, value_of
from te_compile.passes.einsum_letters import adds_nothing_up, is_einsum
from te_compile.passes.enclosing_module import enclosing_module
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.grouped_linears import FORM, OTHER_FORM, grouped_site, is_grouped_product
from te_compile.passes.left_products import left_site
from te_compile.passes.linear_convolutions import convolution_site, is_convolution
from te_compile.passes.linear_einsums import einsum_site
from te_compile.passes.lone_linears import LINEARS
from te_compile.passes.names import KnownNames, module_name, own_variable
from te_compile.passes.plan import Cause, Plan, Site
from te_compile.passes.regions import Left, Region
from te_compile.passes.summed_products import PLAIN, factors_of, sum_apart
from te_compile.passes.weight_expressions import NotAWeightError, Weights

RECURRENT = (
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
"""Whole layers, which Dynamo captures where it is told to, and the cells of one step."""
OF_MODULES = (*RECURRENT, "multi_head_attention", "transformer_encoder_layer")
"""Operators that are all of what a module of torch.nn's computes: what they give is no product, but a state."""
_PRODUCTS: dict[Any, str] = {
    torch.matmul: "matmul",
    operator.matmul: "matmul",
    operator.imatmul: "matmul",
    torch.linalg.matmul: "matmul",
    torch.mm: "mm",
    torch.bmm: "bmm",
    torch.baddbmm: "baddbmm",
    torch.addmm: "addmm",
    torch.mv: "mv",
    torch.addmv: "addmv",
    torch.einsum: "einsum",
    torch.inner: "inner",
    torch.addbmm: "addbmm",
    torch.tensordot: "tensordot",
    torch.linalg.multi_dot: "multi_dot",
    torch.chain_matmul: "chain_matmul",
    torch._grouped_mm: FORM,
    getattr(F, "grouped_mm", torch._grouped_mm): FORM,
    F.bilinear: "bilinear",
    F.multi_head_attention_forward: "multi_head_attention",
    **{getattr(torch, form): form for form in RECURRENT},
    torch._transformer_encoder_layer_fwd: "transformer_encoder_layer",
}
_PRODUCT_METHODS = {
    "matmul", "mm", "bmm", "baddbmm", "addmm", "inner", "addbmm", "addmm_", "baddbmm_", "addbmm_",
    "mv", "addmv", "addmv_",
}  # fmt: skip
_MATRIX_PRODUCTS = ("matmul", "mm")
_PRODUCTS_WITH_ADDEND = ("addmm", "baddbmm", "addbmm", "addmv")

STAYS_CLOSED = "te_stays_closed"
"""Meta key: why a pass that could have opened this opaque product into linears left it."""


def _linear_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """``F.linear(x, weight[N, K], bias)``."""
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    if not (isinstance(value_of(x), Tensor) and isinstance(value_of(weight), Tensor)) or value_of(weight).dim() != 2:
        return None
    out_features, in_features = map(size_hint, value_of(weight).shape)
    site = Site("", "linear", region, node, rows_of(value_of(x)), (in_features, out_features), x, weight, bias)
    if isinstance(value := value_of(bias), Tensor) and not same_sizes(value.shape, value_of(weight).shape[:1]):
        sum_apart(site, weight, weights)
    try:
        site.multiplies_by(weights.weight(weight, region, transposed=False, by_products=True))
    except NotAWeightError as reason:
        site.keep(Cause.UNSUPPORTED, str(reason))
        site.weight = weights.owner(weight, region) or weight
    return site


def _product_site(
    region: Region, node: Node, weights: Weights, form: str, x: Any, matrix: Any, bias: Node | None = None
) -> Site | None:
    """``x @ matrix (+ bias)``; None unless ``matrix`` is made from a parameter."""
    value = value_of(x) if isinstance(x, Node) else None
    shape = getattr(value_of(matrix), "shape", ()) if isinstance(matrix, Node) else ()
    if not isinstance(value, Tensor) or value.dim() == 0 or len(shape) != 2:
        return None
    in_features, out_features = map(size_hint, shape)
    site = Site("", form, region, node, rows_of(value), (in_features, out_features), x, matrix, bias)
    try:
        # The second operand of a product is [K, N]: a weight stored that way is the transpose of a linear's.
        site.multiplies_by(weights.weight(matrix, region, transposed=True))
    except NotAWeightError as reason:
        parameter = weights.owner(matrix, region)
        if parameter is None:
            return None
        site.weight = parameter
        site.keep(Cause.UNSUPPORTED, str(reason))
    return site


def _matmul_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """``x[..., K] @ weight[K, N]``, as an operator, a function or a method."""
    # A third argument is an output to write to or a dtype: not the plain product.
    if len(node.args) + len(node.kwargs) != 2:
        return None
    x, matrix = argument(node, 0, "input"), argument(node, 1, "other") or node.kwargs.get("mat2")
    return _product_site(region, node, weights, "matmul", x, matrix)


def _addmm_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """``addmm(bias[N], x[M, K], weight[K, N])``, or with whatever else is added."""
    bias, x, weight = (argument(node, i, name) for i, name in enumerate(("input", "mat1", "mat2")))
    factors = factors_of(node)
    if factors is None or len(node.args) > 3 or "out" in node.kwargs or not is_tensor(bias):
        return None
    site = _product_site(region, node, weights, "conv1d", x, weight, bias)
    if site is None:
        return None
    value = value_of(bias)
    is_a_bias = value.dim() == 1 and size_hint(value.shape[0]) == site.features[1]
    if not site.transposed or not is_a_bias:
        site.form = "addmm"
    if not is_a_bias or factors != PLAIN:
        sum_apart(site, weight, weights, factors)
    return site


def _other_site(region: Region, node: Node, weights: Weights) -> Site | None:
    """Any other product that has a parameter among its operands."""
    known = node.target in _PRODUCTS if node.op == "call_function" else node.target in _PRODUCT_METHODS
    if not known or adds_nothing_up(node):
        return None
    form = _PRODUCTS[node.target] if node.op == "call_function" else str(node.target)
    added = argument(node, 0, "input") if form.removesuffix("_") in _PRODUCTS_WITH_ADDEND else None
    parameters = [r for n in node.all_input_nodes if n is not added and (r := weights.owner(n, region)) is not None]
    matrices = [w for w in parameters if value_of(w).dim() >= 2]
    if not matrices:
        return None
    weight = max(matrices, key=lambda w: math.prod(map(size_hint, value_of(w).shape)))  # not attention's bias_k, a row
    left = argument(node, 0, "input")
    is_left = called(node) in _PLAIN_PRODUCTS and is_tensor(left) and weights.owner(left, region) is weight
    tokens, features = _extent_on_the_left(node, left) if is_left else _extent(node, form, weight, matrices)
    site = Site("", form, region, node, tokens, features, weight=weight)
    if weights.from_the_call.isdisjoint(node.all_input_nodes):
        why = "all that it multiplies belongs to the model, as where a weight is scaled by its norm"
        site.keep(Cause.RULE, f"{why}; nothing to do: FP8 is for products with what comes from the call")
    site.keep(Cause.UNSUPPORTED, node.meta.get(STAYS_CLOSED) or _no_fp8_form(form))
    return site


def _no_fp8_form(form: str) -> str:
    """Why a product of this form has no other reason than its form to stay in high precision."""
    if form == FORM:
        return OTHER_FORM
    if form in RECURRENT:
        return f"this {form} makes its products inside of one operator; write them out with F.linear for FP8"
    advice = "write it as F.linear, x @ weight or torch.bmm(x, weights) for FP8, where it is one"
    return f"this {form} is no product that has an FP8 form; {advice}"


_PLAIN_PRODUCTS = {"matmul", "mm", "bmm"}
_AS_MODULES_STORE_THEM = {"bilinear", *OF_MODULES}
"""Forms whose weights are [out_features, in_features], as those of nn.Linear are."""


def _extent(node: Node, form: str, weight: Node, matrices: list[Node]) -> tuple[int, tuple[int, int]]:
    """Tokens and features of a product with ``weight``, as far as its shape and that of the result say."""
    first, *others = (size_hint(size) for size in value_of(weight).shape)
    result = value_of(node)
    result = result[0] if isinstance(result, (tuple, list)) else result
    tokens = rows_of(result) if isinstance(result, Tensor) and result.dim() else 1
    if form not in _AS_MODULES_STORE_THEM:
        return tokens, (math.prod((first, *others[:-1])), others[-1])
    # A recurrence multiplies x by one matrix and its state by another, and adds the results: as one beside the other.
    shapes = [list(map(size_hint, value_of(each).shape)) for each in matrices]
    return tokens, (sum(math.prod(shape[1:]) for shape in shapes if shape[0] == first), first)


def _extent_on_the_left(node: Node, left: Node) -> tuple[int, tuple[int, int]]:
    """The same of ``left[…, N, K] @ x[…, K, M]``, as of what a model learned to ask of x: tokens are columns."""
    out_features, in_features = ([1, *map(size_hint, value_of(left).shape)])[-2:]
    return math.prod(map(size_hint, value_of(node).shape)) // max(1, out_features), (in_features, out_features)


def _is_matrix_product(node: Node) -> bool:
    name = node.target if node.op == "call_method" else _PRODUCTS.get(node.target)
    return node.op in ("call_function", "call_method") and name in _MATRIX_PRODUCTS


_FORMS: tuple[tuple[Callable[[Node], bool], Callable[[Region, Node, Weights], Site | None]], ...] = (
    (lambda node: node.target in LINEARS, _linear_site),
    (lambda node: node.target in (torch.addmm, "addmm"), _addmm_site),
    (_is_matrix_product, _matmul_site),
    (_is_matrix_product, left_site),
    (is_batched_product, batched_site),
    (is_plain_product, broadcast_site),
    (is_grouped_product, grouped_site),
    (is_einsum, einsum_site),
    (is_einsum, batched_einsum_site),
    (is_convolution, convolution_site),
    (lambda node: node.op in ("call_function", "call_method"), _other_site),
)
"""How to tell each form, and what makes a site of it; where that finds none, the next form is tried."""


def _sites_in(region: Region, weights: Weights) -> Iterator[Site]:
    transformed, own = transforms_around(region.graph), own_variable(region.graph)
    for node in region.graph.nodes:
        for matches, build in _FORMS:
            site = build(region, node, weights) if matches(node) else None
            if site is not None:
                site.name = module_name(node, site.root_weight or site.weight, own)
                if node in transformed:
                    site.keep(Cause.UNSUPPORTED, transformed[node])
                yield site
                break


def _sites_left(left: Left, parameters: Mapping[Node, Parameter]) -> Iterator[Site]:
    """The linears of a body that no pass enters, for the report alone; parameters: the root's."""
    inside = Region(left.body)
    held = {node: value for node in inside.placeholders if isinstance(value := value_of(node), Parameter)}
    held |= {node: parameters[outside] for node, outside in left.handed.items() if outside in parameters}
    own = own_variable(inside.graph)
    for site in _sites_in(inside, Weights([inside], held)):
        if site.weight in left.handed:
            site.root_weight = left.handed[site.weight]
            site.name = module_name(site.node, site.root_weight, own)
        site.cause = None  # whatever else is wrong with it
        why = f"inside the higher-order op {left.operator}, whose body is left alone"
        site.keep(Cause.UNSUPPORTED, f"{why}; move it out of there for FP8")
        yield site


def _keep_what_makes_weights(sites: list[Site]) -> None:
    """A product whose result is a weight, or a part of one, is rounded when that is quantised, and not before."""
    making = {node for site in sites if site.matrix is not None for node, _ in site.matrix.nodes}
    for site in sites:
        if site.node in making:
            why = "it makes a weight of another linear, which is rounded when it is quantised"
            site.keep(Cause.RULE, f"{why}; nothing to do: FP8 here would round it twice")


def _keep_products_with_themselves(sites: list[Site], weights: Weights) -> None:
    """``w @ w.T`` is no linear. What a model asks of it, as how far from orthogonal ``w`` is, rounding would bury."""
    for site in sites:
        if site.x is not None and site.weight is not None and weights.are_of_one_parameter(site.x, site.weight):
            why = "it multiplies a parameter with itself, as where a weight is held orthogonal"
            site.keep(Cause.RULE, f"{why}; nothing to do: FP8 is for products with what comes from the call")


def find_linears(regions: list[Region], left: list[Left], example_inputs: Any, plan: Plan) -> int:
    """Fill ``plan`` with every linear of ``regions``; those in bodies that were ``left`` alone are kept, and say so."""
    root = regions[0]
    for placeholder, example in zip(root.placeholders, example_inputs, strict=True):
        parameter = parameter_of(example)
        if parameter is not None:
            plan.parameters[placeholder] = parameter
    weights = Weights(regions, plan.parameters)
    for region in regions:
        plan.sites.extend(_sites_in(region, weights))
    _keep_what_makes_weights(plan.sites)
    _keep_products_with_themselves(plan.sites, weights)
    for each in left:
        plan.sites.extend(_sites_left(each, plan.parameters))
    _give_full_names(plan)
    return len(plan.sites)


def _give_full_names(plan: Plan) -> None:
    """What Dynamo calls a linear behind a graph break starts there; the user's names start at the model."""
    module = enclosing_module() if plan.sites else None
    if module is None:
        return
    names = KnownNames(module)
    for site in plan.sites:
        placeholder = site.root_weight or site.weight
        parameter = plan.parameters.get(placeholder) if placeholder is not None else None
        full = names.name(site.node, parameter)
        if full is not None and full != site.name:
            site.name, site.local_name = full, site.name
