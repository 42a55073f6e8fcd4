"""Hugging Face's generate with its caches: a call for the prompt, then one a token that reads and writes the cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="generates with Hugging Face models")

from te_compile.passes import manager
from tests.compiling import compiled, cosine
from tests.zoo.case import Setting
from tests.zoo.models import ARCHITECTURES

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.slow]

PROMPT, NEW = 9, 6


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_generation_with_a_cache_is_that_of_the_whole_text(architecture: str, cache: str) -> None:
    """The logits of every new token beside those of one high-precision call on the text that came out."""
    case = ARCHITECTURES[architecture].case(Setting(train=False))
    model, ids = case.model, case.inputs["input_ids"][:, :PROMPT]
    forward = model.forward
    with manager.recording() as records:
        model.forward = compiled(forward)
        made = model.generate(
            ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True, disable_compile=True,  # transformers' own, which knows no te_fp8
            cache_implementation=None if cache == "dynamic" else cache,
        )  # fmt: skip
    model.forward = forward
    text = made.sequences[:, :-1]
    with torch.no_grad():
        if architecture == "t5":
            expected = model(input_ids=ids, decoder_input_ids=text).logits
        else:
            expected = model(text).logits[:, PROMPT - 1 :]
    assert all(record.plan.selected for record in records) and len(records) >= 2, "the prompt, and a token"
    assert len(made.logits) == NEW == expected.shape[1]
    assert all(cosine(got, expected[:, i]) > 0.99 for i, got in enumerate(made.logits))
