"""Unmodified Hugging Face models: a training step, a prefill, a decoding step.

Each model has the shapes of a real one and fewer layers, random weights and random ids. One row per model, work and
variant: the time of a call and the peak memory. te_fp8's rows also say how far the loss, the gradients or the logits
lie from the same weights in high precision.

One process times one variant after the other. Where the GPU waits for the host that is not enough: the same code takes
a quarter more or less from one minute to the next. ``--turns`` builds all variants of a work, lets them take turns and
gives each the best of its medians.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import measure, peers
from benchmarks.layer import SAVING
from benchmarks.measure import DEVICE, Runnable, Variant
from te_compile.passes import manager
from tests.fuzz.emulation import Fp8Products, Scales, statuses_of

WORKS = ("train", "prefill", "decode")
LOSS, COSINE, TEXTBOOK = 0.02, 0.97, 0.01
LOGITS_DB, TEXTBOOK_DB = 14.0, 1.0
"""What te_fp8 must keep: the loss within 2%, the direction of every matrix's gradient to this cosine or to what
textbook FP8 keeps less this much, and the logits of inference; errors add up over the layers."""


@dataclass(frozen=True)
class Model:
    """A model class, its config, and the batch that a training step and a prefill take: (rows, sequence)."""

    model: str
    config: str
    parameters: dict[str, Any]
    train: tuple[int, int]
    prefill: tuple[int, int]
    decodes: bool = True
    images: bool = False  # what it takes: images instead of token ids, and then a batch is (rows, pixels a side)
    attn: str = ""  # the one way of attention that it has, where it has no other
    decoder_ids: bool = False  # does it want ids for its decoder where there are no labels to make them of?

    def configured(self, attn: str, changes: dict[str, Any]) -> Any:
        """The config, with those of ``changes`` that it has."""
        import transformers

        tokens = {} if self.images else {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        parameters = {**tokens, **self.parameters}
        parameters |= {name: changes[name] for name in changes if name in parameters}
        config = getattr(transformers, self.config)(**parameters)
        config._attn_implementation = self.attn or attn
        if not self.images:
            config.use_cache = False
        return config

    def built(self, config: Any) -> nn.Module:
        """The model of such a config, in the default dtype and on the default device."""
        import transformers

        model: nn.Module = getattr(transformers, self.model)(config)
        return model


GPT2_WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS = {
    # Llama-3-8B's shape, 4 of its 32 layers
    "llama8b": Model(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        },
        train=(4, 2048),
        prefill=(1, 2048),
    ),
    "qwen3_4b": Model(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 6,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        },
        train=(4, 2048),
        prefill=(1, 2048),
    ),
    # Mistral-7B's shape, 4 of its 32 layers; each query sees the last 4096 keys
    "mistral7b": Model(
        "MistralForCausalLM",
        "MistralConfig",
        {
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
            "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
            "max_position_embeddings": 8192,
        },
        train=(1, 8192),
        prefill=(1, 8192),
    ),
    # GPT-2 XL's shape, 8 of its 48 layers; its linears are Conv1D
    "gpt2xl": Model(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 1600, "n_layer": 8, "n_head": 25, "n_positions": 1024, "vocab_size": 50304, **GPT2_WITHOUT_DROPOUT},
        train=(16, 1024),
        prefill=(1, 1024),
    ),
    # BERT-large's shape, 8 of its 24 layers
    "bert_large": Model(
        "BertForMaskedLM",
        "BertConfig",
        {
            "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 4096,
            "vocab_size": 30528, **BERT_WITHOUT_DROPOUT,
        },
        train=(64, 512),
        prefill=(32, 512),
        decodes=False,
    ),
    # BART-large's shape, 4 of its 12 layers on either side: attention across, and masks that are handed on
    "bart_large": Model(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 32000, "d_model": 1024, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096, "encoder_attention_heads": 16, "decoder_attention_heads": 16, "dropout": 0.0,
        },
        train=(32, 512),
        prefill=(32, 512),
        decodes=False,
    ),
    # T5-large's shape, 4 of its 24 layers on either side: attention with a learned bias, no dropout
    "t5_large": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 4, "num_decoder_layers": 4,
            "num_heads": 16, "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
        train=(16, 512),
        prefill=(16, 512),
        decodes=False,
        decoder_ids=True,
    ),
    # Falcon-7B's shape, 2 of its 32 layers: one head of keys for 71 of queries
    "falcon7b": Model(
        "FalconForCausalLM",
        "FalconConfig",
        {
            "vocab_size": 32000, "hidden_size": 4544, "num_hidden_layers": 2, "num_attention_heads": 71,
            "multi_query": True, "parallel_attn": True, "bias": False,
        },
        train=(4, 2048),
        prefill=(1, 2048),
    ),
    # Gemma-3-4B's shape, 6 of its 34 layers: five in a window of 1024, one that sees everything
    "gemma3_4b": Model(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
            "max_position_embeddings": 8192,
        },
        train=(1, 8192),
        prefill=(1, 8192),
    ),
    # ModernBERT-large's shape, 6 of its 28 layers: one in three sees everything, the others 64 either way
    "modernbert_large": Model(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            "hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 6, "num_attention_heads": 16,
            "vocab_size": 50368, "local_attention": 128, "cls_token_id": 1, "sep_token_id": 2,
        },
        train=(8, 2048),
        prefill=(8, 2048),
        decodes=False,
    ),
    # Mixtral 8x7B's shape, 2 of its 32 layers: 8 experts, 2 for each token
    "mixtral": Model(
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        train=(4, 2048),
        prefill=(1, 2048),
    ),
    # GPT-OSS-20B's shape, 2 of its 24 layers: 32 experts, 4 for each token; sinks, and every other layer in a window
    "gpt_oss": Model(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "vocab_size": 32000, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 2,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "sliding_window": 128,
        },
        train=(2, 2048),
        prefill=(1, 2048),
        attn="eager",
    ),
    # ViT-L/16, 12 of its 24 layers: 197 tokens an image
    "vit_large": Model(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 4096,
            "image_size": 224, "num_labels": 1000,
        },
        train=(128, 224),
        prefill=(64, 224),
        decodes=False,
        images=True,
    ),
}  # fmt: skip

# What replaces the sizes where there is no GPU.
TINY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "n_embd": 128, "n_layer": 2, "n_head": 4, "image_size": 64,
    "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "sliding_window": 16, "local_attention": 16,
    "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One model doing one work."""

    name: str
    work: str
    attn: str
    dtype: torch.dtype
    padded: bool = False

    def build(self) -> nn.Module:
        """The model on its device, the same weights each time after a seed."""
        model = MODELS[self.name]
        config = model.configured(self.attn, TINY if DEVICE.type == "cpu" else {})
        with DEVICE:
            built = model.built(config)
        return built.to(self.dtype).train(self.work == "train")

    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of a call."""
        model = MODELS[self.name]
        rows, sequence = {"train": model.train, "prefill": model.prefill, "decode": (8, 1)}[self.work]
        highest = 30000
        if DEVICE.type == "cpu":
            rows, sequence, highest = min(rows, 2), min(sequence, 64), TINY["vocab_size"]
        if model.images:
            pixels = torch.randn(rows, 3, sequence, sequence, device=DEVICE, dtype=self.dtype)
            labels = {"labels": torch.randint(0, 1000, (rows,), device=DEVICE)} if self.work == "train" else {}
            return {"pixel_values": pixels, **labels}
        ids = torch.randint(0, highest, (rows, sequence), device=DEVICE)
        mask = {"attention_mask": right_padding(rows, sequence)} if self.padded else {}
        if self.work == "train":
            return {"input_ids": ids, "labels": ids, **mask}
        return {"input_ids": ids, "decoder_input_ids": ids, **mask} if model.decoder_ids else {"input_ids": ids, **mask}


def right_padding(rows: int, sequence: int) -> Tensor:
    """Which tokens of a batch are there, int64 [rows, sequence]: rows are from a third of the longest to that."""
    lengths = torch.linspace(max(1, sequence // 3), sequence, rows, device=DEVICE).long()
    return (torch.arange(sequence, device=DEVICE) < lengths[:, None]).long()


def compiled(task: Task, change: Callable[[nn.Module], nn.Module] | None = None, **arguments: Any) -> Runnable:
    """The model, changed by a peer if one is given, under torch.compile."""
    model = task.build()
    if change is not None:
        model = change(model)
    return Runnable(torch.compile(model, **arguments), model)


def variants(task: Task) -> Iterator[Variant]:
    """Every variant of ``task`` that this machine can run."""
    yield Variant("eager", lambda: Runnable(model := task.build(), model))
    yield Variant("compile", partial(compiled, task))
    if task.work == "decode":
        yield Variant("compile_graphs", partial(compiled, task, mode="reduce-overhead"))
    if peers.HAVE_TORCHAO:
        yield from torchao_variants(task)
    if peers.HAVE_TRANSFORMER_ENGINE:
        for recipe in ("delayed", "current"):
            yield Variant(f"te_swap_{recipe}", partial(transformer_engine, task, recipe, swapped))
        if task.name == "llama8b":
            for recipe in ("delayed", "current"):
                yield Variant(f"te_layers_{recipe}", partial(transformer_engine, task, recipe, rewritten))
    yield Variant("te_fp8", partial(compiled, task, backend="te_fp8"), ours=True)
    yield Variant("te_fp8_current", partial(compiled, task, backend="te_fp8", options={"recipe": "current"}), ours=True)
    if task.work == "train":
        for name, options in SAVING.items():
            yield Variant(name, partial(compiled, task, backend="te_fp8", options=options), ours=True)
    if task.work == "decode":
        graphs = {"mode": "reduce-overhead"}
        yield Variant("te_fp8_graphs", partial(compiled, task, backend="te_fp8", options=graphs), ours=True)


def torchao_variants(task: Task) -> Iterator[Variant]:
    """torchao under torch.compile: its training linears, or its quantised weights."""
    if task.work == "train":
        for recipe in ("tensorwise", "rowwise"):
            change = partial(peers.torchao_for_training, recipe=recipe)
            yield Variant(f"torchao_{recipe}", partial(compiled, task, change))
        return
    for granularity in ("tensor", "row"):
        change = partial(peers.torchao_for_inference, granularity=granularity)
        yield Variant(f"torchao_{granularity}", partial(compiled, task, change))
    if task.work == "decode":
        change = partial(peers.torchao_for_inference, granularity="row")
        yield Variant("torchao_row_graphs", partial(compiled, task, change, mode="reduce-overhead"))


def swapped(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Transformer Engine's modules in the place of torch's."""
    return peers.swap_in_transformer_engine(model, dtype)


def rewritten(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A Llama of Transformer Engine's own layers."""
    return peers.TransformerEngineLlama(model, dtype)


def transformer_engine(task: Task, recipe: str, change: Callable[[nn.Module, torch.dtype], nn.Module]) -> Runnable:
    """The model with Transformer Engine's modules, without torch.compile: they break its graphs."""
    model = change(task.build(), task.dtype).train(task.work == "train")
    return Runnable(model, model, peers.transformer_engine_context(recipe))


def call_once(runnable: Runnable, inputs: dict[str, Tensor], training: bool) -> Tensor:
    """One training step, returning the loss, or one forward, returning the logits."""
    if not training:
        with torch.no_grad(), runnable.context():
            logits: Tensor = runnable.call(**inputs).logits
            return logits
    runnable.model.zero_grad(set_to_none=True)
    with runnable.context():
        loss: Tensor = runnable.call(**inputs).loss
    loss.backward()
    return loss.detach()


def check(runnable: Runnable, inputs: dict[str, Tensor], training: bool) -> dict[str, Any]:
    """Compare with the same weights in eager high precision. Returns columns of the row.

    As in training, the scales of the step compared come from the steps before.
    """
    expected = call_once(Runnable(runnable.model, runnable.model), inputs, training).clone()
    reference = measure.gradients(runnable.model)
    with manager.recording() as records:
        for _ in range(3):
            found = call_once(runnable, inputs, training)
    sites = [site for record in records for site in record.plan.sites]
    statuses = statuses_of(sites, runnable.model)
    if not training:
        return check_logits(runnable.model, inputs, expected, found, statuses)
    cosines = cosines_to(reference, runnable.model)
    worst = min(cosines, key=lambda name: (cosines[name] == cosines[name], cosines[name]))  # NaN is the worst of all
    difference = (found / expected - 1).item()
    row = {"loss": expected.item(), "loss_difference": difference, "cosine": cosines[worst], "worst_gradient": worst}
    wrong = [] if abs(difference) <= LOSS else [f"loss {difference:+.2%}"]
    if not cosines[worst] >= COSINE:
        textbook = textbook_cosines(runnable.model, inputs, reference, statuses)
        row["textbook_cosine"] = textbook[worst]
        wrong += [
            f"cosine of {name}'s gradient {cosine:.4f}, textbook FP8 {textbook[name]:.4f}"
            for name, cosine in cosines.items()
            if not (cosine >= COSINE or cosine >= textbook[name] - TEXTBOOK)
        ]
    return {**row, "wrong": "; ".join(wrong)} if wrong else row


def check_logits(
    model: nn.Module, inputs: dict[str, Tensor], expected: Tensor, found: Tensor, statuses: dict[str, list[bool]]
) -> dict[str, Any]:
    """Columns of an inference: signal over error of the logits ``found``, and the textbook's if that is low."""
    decibel = measure.sqnr(expected, found)
    if decibel >= LOGITS_DB:
        return {"logits_db": decibel}
    logits = textbook_call(model, inputs, statuses, training=False)
    row = {"logits_db": decibel, "textbook_db": measure.sqnr(expected, logits)}
    if decibel >= row["textbook_db"] - TEXTBOOK_DB:
        return row
    return {**row, "wrong": f"logits {decibel:.1f} dB, textbook FP8 {row['textbook_db']:.1f} dB"}


def cosines_to(reference: dict[str, Tensor], model: nn.Module) -> dict[str, float]:
    """The cosine of every weight matrix's gradient in ``model`` to that in ``reference``."""
    gradients = measure.gradients(model)
    return {
        name: measure.cosine(reference[name], gradients[name])
        for name in measure.telling(reference, matrices_only=True)
    }


def textbook_cosines(
    model: nn.Module, inputs: dict[str, Tensor], reference: dict[str, Tensor], statuses: dict[str, list[bool]]
) -> dict[str, float]:
    """The same where per-tensor FP8 as a textbook has it, emulated in fp32, runs those linears that te_fp8 runs in FP8.

    statuses: of each linear by its name, whether its uses do. A textbook that left some of them alone, such as a
    mixture's experts, would look better than any FP8 is. LookupError if it met others.

    Two things are small differences of large numbers in an untrained model, and far off in any per-tensor FP8:
    gradients through a softmax over thousands of keys, and which experts a router prefers. A token that changes its
    expert moves gradients more than all rounding does.
    """
    textbook_call(model, inputs, statuses, training=True)
    cosines = cosines_to(reference, model)
    measure.free_memory()  # the textbook's weights, for the memory of what follows is measured
    return cosines


def textbook_call(
    model: nn.Module, inputs: dict[str, Tensor], statuses: dict[str, list[bool]], training: bool
) -> Tensor:
    """``call_once`` of ``model`` in the textbook's FP8. LookupError if other products than the planned ran in FP8."""
    textbook = Fp8Products(model, statuses, Scales(None, delayed=False))

    def run(**inputs: Tensor) -> Any:
        with textbook:
            return model(**inputs)

    result = call_once(Runnable(run, model), inputs, training)
    planned = sum(map(sum, statuses.values()))
    if textbook.products != planned:
        raise LookupError(f"the textbook ran {textbook.products} products in FP8, and te_fp8 {planned}")
    return result


def measure_variant(variant: Variant, task: Task, arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, check if it is ours, time. Returns the columns of the row."""
    runnable = variant.build()
    inputs = task.inputs()
    training = task.work == "train"
    quality = check(runnable, inputs, training) if variant.ours else {}

    def step() -> Tensor:
        return call_once(runnable, inputs, training)

    for _ in range(3):
        step()
    with measure.Memory() as memory:
        milliseconds = measure.median_ms(step, arguments.iters, warmup=5)
    if arguments.profile:
        measure.print_kernels(step)
    return {"ms": milliseconds, **memory.row(), **quality}


def in_turns(task: Task, chosen: Sequence[Variant], what: dict[str, Any], rows: measure.Rows, iterations: int) -> None:
    """Write a row for each variant of ``task``, timed in turns."""
    inputs, training = task.inputs(), task.work == "train"
    measure.rows_in_turns(chosen, {"ms": lambda each: call_once(each, inputs, training)}, rows, what, iterations)


def choose(given: str, known: tuple[str, ...], argument: str) -> list[str]:
    """The names in the comma-separated ``given``; one that does not exist ends the program."""
    names = given.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"{argument}: no {name!r}; there are {', '.join(known)}")
    return names


def main() -> int:
    """Measure every chosen variant of every chosen work; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    measure.add_arguments(parser, iterations=15)
    parser.add_argument("--models", default="llama8b,gpt2xl,bert_large", help=f"of {', '.join(MODELS)} (%(default)s)")
    parser.add_argument("--works", default=",".join(WORKS), help="(%(default)s)")
    parser.add_argument("--padded", action="store_true", help="an attention mask: rows of a batch differ in length")
    arguments = parser.parse_args()
    models = choose(arguments.models, tuple(MODELS), "--models")
    works = choose(arguments.works, WORKS, "--works")
    if DEVICE.type == "cpu":
        arguments.iters = min(arguments.iters, 3)
    rows = measure.Rows(arguments.out)
    measure.describe_device(rows)
    tasks = [
        Task(name, work, arguments.attn, measure.DTYPES[arguments.dtype], arguments.padded and not MODELS[name].images)
        for name in models
        for work in works
        if work != "decode" or MODELS[name].decodes
    ]
    for task, chosen in zip(tasks, measure.chosen_of_each(map(variants, tasks), arguments.only), strict=True):
        what = {"what": "model", "model": task.name, "work": task.work, "attn": task.attn, "dtype": arguments.dtype}
        what |= {"padded": True} if task.padded else {}
        if arguments.turns and chosen:
            in_turns(task, chosen, what, rows, arguments.iters)
            continue
        for variant in chosen:
            measure.attempt(variant, rows, what, partial(measure_variant, task=task, arguments=arguments))
    return rows.exit_status()


if __name__ == "__main__":
    sys.exit(main())
