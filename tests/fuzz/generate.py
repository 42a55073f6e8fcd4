"""From one seed, one program."""

from __future__ import annotations

import random

import torch

from te_compile.optional_passes import OPTIONAL_PASSES
from tests.fuzz import linear_steps, other_steps
from tests.fuzz.draft import LARGEST, LARGEST_ON_GPU, Draft
from tests.fuzz.program import CONTEXTS, Program, Setting

KINDS = (
    (linear_steps.add_linear, 30), (other_steps.add_unary, 16), (other_steps.add_binary, 15),
    (other_steps.add_norm, 10), (other_steps.add_view, 12), (other_steps.add_gate, 5), (other_steps.add_write, 5),
    (other_steps.add_scale_or_shift, 4), (other_steps.add_attention, 4), (other_steps.add_batch_norm, 1),
    (other_steps.add_modulation, 4), (other_steps.add_loss, 2),
)  # fmt: skip
"""What adds steps, and how often."""

BLOCKS = (*CONTEXTS, "checkpoint", "checkpoint", "checkpoint", "checkpoint")


def generate(seed: int, inductor: float = 0.0, device: str = "cpu") -> Program:
    """The program of ``seed``, to run on ``device``; ``inductor`` is the chance of the slow compiler."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    dtype = dice.choice([torch.float32] * 6 + [torch.bfloat16] * 3 + [torch.float16])
    autocast = dtype == torch.float32 and dice.random() < 0.2
    compiler = "inductor" if dice.random() < inductor else "aot_eager"
    graphs = device != "cpu" and compiler == "inductor" and dice.random() < 0.15
    setting = Setting(
        recipe=dice.choice(["delayed", "current"]),
        compiler=compiler,
        autocast=autocast,
        evaluate=dice.random() < 0.1,
        dynamic=dice.random() < 0.06 and not graphs,
        device=device,
        calls=2 if device == "cpu" else 4,  # what is replayed on a GPU is so from the third call on
        accumulate=dice.random() < 0.2 and not graphs,
        save_memory=dice.random() < 0.1,
        cache_weights=dice.random() < 0.9,
        skip_passes=_skipped(dice),
        mode="reduce-overhead" if graphs else None,
    )
    draft = Draft(dice, dtype, LARGEST if device == "cpu" else LARGEST_ON_GPU)
    _add_inputs(draft, setting)
    blocks = _add_steps(draft, dice.randrange(3, 13))
    program = Program(tuple(draft.inputs), tuple(draft.steps), _outputs(draft), setting, tuple(blocks), seed)
    return program.without_dead_steps()


def _skipped(dice: random.Random) -> tuple[str, ...]:
    """Mostly nothing; now and then a few passes, half of them or all that a graph can do without."""
    number = len(OPTIONAL_PASSES)
    left_out = dice.choice([1, 3, number // 2, number]) if dice.random() < 0.1 else 0
    return tuple(sorted(dice.sample(OPTIONAL_PASSES, left_out)))


def _add_inputs(draft: Draft, setting: Setting) -> None:
    last = draft.one_of(16, 32, 32, 32, 48, 64, 24, 40)
    before = draft.one_of((5,), (2, 7), (3, 4), (1, 6), (2, 16), (9,), (2, 3, 4), (1,))
    if setting.device != "cpu" and draft.chance(0.5):  # more than a tile of a kernel
        last = draft.one_of(128, 136, 192, 256, 320)
        before = draft.one_of((130,), (2, 65), (256,), (3, 100), (2, 4, 33))
    for _ in range(draft.one_of(1, 1, 2)):
        draft.add_input((*before, last), draft.dtype, requires_grad=draft.chance(0.4), grows=setting.dynamic)


def _add_steps(draft: Draft, number: int) -> list[tuple[int, str]]:
    """Add steps, some of them in blocks; the kinds of the blocks."""
    makers, weights = zip(*KINDS, strict=True)
    blocks: list[tuple[int, str]] = []
    left = 0  # steps until the block ends
    linear_steps.add_linear(draft) if draft.chance(0.5) else other_steps.add_norm(draft)
    for _ in range(number):
        if left == 0:
            draft.block, draft.block_kind = 0, ""
            if draft.chance(0.09):
                draft.block, draft.block_kind = len(blocks) + 1, draft.random.choice(BLOCKS)
                blocks.append((draft.block, draft.block_kind))
                left = draft.random.randrange(1, 5)
        else:
            left -= 1
        draft.random.choices(makers, weights)[0](draft)
        if draft.chance(0.01):
            other_steps.add_graph_break(draft)
    draft.block, draft.block_kind = 0, ""
    return blocks


def _outputs(draft: Draft) -> tuple[str, ...]:
    """The last variable, what else nobody reads, and now and then something from the middle."""
    read = {name for step in draft.steps for name in step.reads}
    made = [name for step in draft.steps for name in step.makes if name in draft.variables]
    unread = [name for name in made if name not in read]
    chosen = unread[-draft.one_of(1, 2, 3) :] or made[-1:] or draft.variables[-1:]
    if made and draft.chance(0.15):
        chosen.append(draft.random.choice(made))
    return tuple(dict.fromkeys(chosen))
