"""The ordered pipeline: what happens to a captured graph, top to bottom.

Dynamo's graph first, where torch functions still have their names and state can be added; then the joint graph of
forward and backward, where everything is decomposed and both directions fuse alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.fx import Graph

from te_compile.options import Options
from te_compile.passes.accumulate_in_products import accumulate_in_products
from te_compile.passes.add_in_products import add_in_products
from te_compile.passes.cat_producers import cat_producers
from te_compile.passes.channels_last_convolutions import channels_last_convolutions
from te_compile.passes.choose_implementations import choose_implementations
from te_compile.passes.compute_once import compute_once
from te_compile.passes.delay_weight_gradients import delay_weight_gradients
from te_compile.passes.direct_amaxes import direct_amaxes
from te_compile.passes.drop_noop_casts import drop_noop_casts
from te_compile.passes.drop_unread_operands import drop_unread_operands
from te_compile.passes.drop_unread_values import drop_unread_values
from te_compile.passes.follow_writes import follow_writes
from te_compile.passes.fuse_loss_backward import fuse_loss_backward
from te_compile.passes.fuse_norm_backward import fuse_norm_backward
from te_compile.passes.fuse_norm_quantize import fuse_norm_quantize
from te_compile.passes.fuse_producers import fuse_producers
from te_compile.passes.gather_backwards import gather_backwards
from te_compile.passes.give_four_dimensions import give_four_dimensions
from te_compile.passes.join_biases import join_biases
from te_compile.passes.join_gradients import join_gradients
from te_compile.passes.join_products import join_products
from te_compile.passes.lay_out_attention_gradients import lay_out_attention_gradients
from te_compile.passes.long_convolutions import long_convolutions
from te_compile.passes.lower_losses import lower_losses
from te_compile.passes.make_apart import make_apart
from te_compile.passes.memory import tag_memory
from te_compile.passes.narrow_norm_gradients import narrow_norm_gradients
from te_compile.passes.open_attention_modules import open_attention_modules
from te_compile.passes.open_encoder_layers import open_encoder_layers
from te_compile.passes.open_norms import open_norms
from te_compile.passes.open_weight_norms import open_weight_norms
from te_compile.passes.overwrite_logits import keep_read_logits, overwrite_logits
from te_compile.passes.pair_producers import pair_producers
from te_compile.passes.plain_operators import plain_operators
from te_compile.passes.prune_outputs import prune_outputs
from te_compile.passes.quantize_late import quantize_late
from te_compile.passes.read_scales_in_place import read_scales_in_place
from te_compile.passes.recognise_attention import recognise_attention
from te_compile.passes.recognise_norms import recognise_norms
from te_compile.passes.recomputed_attentions import recomputed_attentions
from te_compile.passes.remake_transposed import remake_transposed
from te_compile.passes.save_between_regions import save_between_regions
from te_compile.passes.scale_before_products import scale_before_products
from te_compile.passes.set_names_aside import set_names_aside
from te_compile.passes.settle_sums import settle_sums
from te_compile.passes.share_across_regions import share_across_regions
from te_compile.passes.share_inputs import share_inputs
from te_compile.passes.sum_columns_late import sum_columns_late
from te_compile.passes.sum_few_rows import sum_few_rows
from te_compile.passes.sum_loss_gradients import sum_loss_gradients
from te_compile.passes.transpose_late import transpose_late

GraphPass = Callable[[Graph], int]


def normalize_passes(options: Options) -> tuple[GraphPass, ...]:
    """On Dynamo's graph and on every body inside it; then linears are found, selected and lowered (``backend``)."""
    return (
        plain_operators,  # first: all others know operators as functions
        drop_noop_casts,  # before the norms, which a no-op cast hides
        drop_unread_operands,
        drop_unread_values,  # after it, which leaves values of which only the shape was read
        follow_writes,  # after them: who only looked at a shape reads neither what was before nor behind a write
        make_apart,
        open_encoder_layers,  # before the norms inside them are looked for
        open_attention_modules,  # the linears inside torch.nn's attention come out, and the view of what they read
        partial(recognise_attention, options=options),
        give_four_dimensions,
        recognise_norms,
        join_biases,  # before the losses, which want logits that a product has written
        scale_before_products,  # likewise
        lower_losses,  # no linear's business, nor FP8's
    )


JOINT_PASSES: tuple[GraphPass, ...] = (
    direct_amaxes,  # first: there is less to look at for all that follow
    share_inputs,  # before the fusions: two quantizes of one value would hide it from the fusions
    fuse_norm_quantize,
    add_in_products,  # before the producers: what they would add is a read of theirs, and none of the product's
    open_norms,  # what no kernel runs goes back to Inductor, and its pointwise part to the producers
    fuse_norm_backward,  # after them: only a kernel gains by the sum; before producers, which would take it along
    narrow_norm_gradients,  # likewise: only a kernel reads what is not there in float32
    fuse_loss_backward,  # likewise
    sum_few_rows,  # before the producers, which ask who else reads a gradient, and in which dtype
    gather_backwards,  # likewise
    open_weight_norms,  # before the producers, as are the next two
    long_convolutions,
    channels_last_convolutions,
    join_gradients,  # before the producers, which read the parts of a cat where they lie
    cat_producers,  # likewise; before them, which would read the halves
    fuse_producers,
    sum_loss_gradients,  # after fuse_loss_backward, and after the producers, which sum what they read anyway
    overwrite_logits,  # after it, which makes another operator of the loss's backward
    remake_transposed,  # after all that merges with a quantize, for what it reads then is what must be there
    pair_producers,
    transpose_late,  # after the pairs, which write two gradients
    delay_weight_gradients,  # after what was made again is there to be delayed
    quantize_late,  # after the fusions: a weight's cast is one of them
    prune_outputs,  # after the fusions: they ask for both layouts as lowering does
    accumulate_in_products,  # after add_in_products: of the uses of one weight the sum is the gradient
    lay_out_attention_gradients,  # after all that change what attention's backward reads
    tag_memory,
    save_between_regions,  # after all that change what a region ends with
    recomputed_attentions,  # after tag_memory, which may say what is computed again
    choose_implementations,  # after all that change an operator: it judges them as they will run
    sum_columns_late,  # after it: only kernels sum in part
    join_products,  # likewise: only the kernel for few rows gains by it
    set_names_aside,  # after all that know products by their names
    share_across_regions,  # last: it looks for what PyTorch, which comes next, would find equal
)
"""On the joint graph of forward and backward."""

TO_SAVE_MEMORY: tuple[GraphPass, ...] = (remake_transposed, transpose_late, delay_weight_gradients)
"""Those of them that run with ``save_memory=True`` alone."""

DIRECTION_PASSES: tuple[GraphPass, ...] = (read_scales_in_place, compute_once, settle_sums, keep_read_logits)
"""On the graph of each direction, once the partitioner has said what a backward gets; by Inductor alone, but for the
last one, without which a backward pass might be wrong."""

NOT_IN_CUDA_GRAPHS: tuple[GraphPass, ...] = (read_scales_in_place,)
"""Those of them that save the host's time: a replayed graph launches the copy of all scales with the rest, and nobody
waits for the host."""
