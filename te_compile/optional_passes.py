"""Which passes a graph can do without: what is left out gains nothing, and nothing comes out wrong.

For whoever looks for the pass that a fault comes from, and for a model that one of them cannot take, until that is
mended: ``options={"skip_passes": "fuse_producers"}``. docs/passes.md says what each does. Those that are missing here
find the linears, put them in FP8, or keep a result right that another pass, or PyTorch, would have wrong.
"""

from __future__ import annotations

OPTIONAL_PASSES = (
    "plain_operators",
    "drop_noop_casts",
    "drop_unread_operands",
    "drop_unread_values",
    "open_encoder_layers",
    "open_attention_modules",
    "recognise_attention",
    "give_four_dimensions",
    "recognise_norms",
    "lower_losses",
    "fold_masks",
    "move_row_masks",
    "undo_repeated_heads",
    "share_one_head",
    "lower_attentions",
    "window_attentions",
    "widen_heads",
    "biased_attentions",
    "short_attentions",
    "varying_attentions",
    "masked_attentions",
    "draw_dropouts",
    "patches_as_products",
    "defer_logits_gradient",
    "direct_amaxes",
    "share_inputs",
    "fuse_norm_quantize",
    "add_in_products",
    "fuse_norm_backward",
    "narrow_norm_gradients",
    "fuse_loss_backward",
    "join_gradients",
    "fuse_producers",
    "sum_loss_gradients",
    "overwrite_logits",
    "remake_transposed",
    "pair_producers",
    "transpose_late",
    "delay_weight_gradients",
    "quantize_late",
    "prune_outputs",
    "accumulate_in_products",
    "save_between_regions",
    "sum_columns_late",
    "join_products",
    "read_scales_in_place",
    "compute_once",
    "time_tiles",
)
