"""A Hugging Face model from its configuration alone, and an example call of it: no weights, no download.

Parameters and inputs are fake tensors: shapes, dtypes and devices without memory, so a model of any size can be looked
at. What a fake tensor lacks is values; a forward that branches on them needs ``real`` ones, drawn at random.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from te_compile.inspect.explanation import explain
from te_compile.inspect.report import Report

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "image-text": "AutoModelForImageTextToText",
    "base": "AutoModel",
}
"""What ``--task`` takes, and the class of transformers that builds it; "auto" takes the config's ``architectures``."""


class ConfigError(ValueError):
    """A configuration that no model can be built from, or called; the message names the path and what is wrong."""


@dataclass(frozen=True)
class Request:
    """What to look at: the model of ``config``, for ``task``, called with ``batch`` sequences of ``seq`` tokens.

    real: hold random weights in memory, for models whose forward depends on the values of tensors.
    """

    config: Path
    task: str = "auto"
    batch: int = 2
    seq: int = 128
    train: bool = True
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    real: bool = False


def explain_config(request: Request, options: dict[str, Any]) -> Report:
    """``te_compile.explain`` of the model that ``request`` describes. Raises :class:`ConfigError`."""
    config = _config(request.config)
    build = _builder(config, request)
    fake = None if request.real else FakeTensorMode(allow_non_fake_inputs=True)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(request.dtype)
        with torch.device(request.device if fake is None else "meta"):
            model = _built(build, request).train(request.train)
        torch.set_default_dtype(before)
        if fake is not None:
            _make_fake(model, fake, request.device)
        with fake or nullcontext(), torch.set_grad_enabled(request.train):
            with torch.device(request.device):
                call = example_call(model, config, request)
            return explain(model, options=options, **call)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"{request.config}: the forward of {type(config).__name__}'s model depends on the values of tensors "
            f"({error}), which a model without weights has not; --real builds it in memory with random weights"
        ) from None
    finally:
        torch.set_default_dtype(before)


def _make_fake(model: nn.Module, fake: FakeTensorMode, device: str) -> None:
    """Give a model that was built on the meta device fake tensors of ``device``; what is tied stays tied.

    Built there and not under the mode, because constructors may compute with values, on a CPU that they name.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with fake:
                        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                store[name] = made[id(tensor)]  # type: ignore[assignment]  # mypy takes both stores for one of parameters


def _config(path: Path) -> Any:
    """The configuration in a file, or in the ``config.json`` of a directory."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("reading a model's configuration needs transformers: pip install 'te-compile[hf]'") from None
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: expected a Hugging Face config.json, or a directory that holds one; found none")
    try:
        return transformers.AutoConfig.from_pretrained(str(file))
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{path}: transformers cannot read this configuration: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _builder(config: Any, request: Request) -> Callable[[], nn.Module]:
    """A function that makes the model."""
    import transformers

    if request.task != "auto":
        auto = getattr(transformers, TASKS[request.task])
        if type(config) not in auto._model_mapping:
            raise ConfigError(f"{request.config}: a model of type {config.model_type!r} has no form for {request.task}")
        return lambda: auto.from_config(config)
    named = list(getattr(config, "architectures", None) or [])
    found = [each for name in named if (each := getattr(transformers, name, None)) is not None]
    if found:
        return lambda: found[0](config)
    if named:
        raise ConfigError(
            f"{request.config}: architectures names {', '.join(named)}, which transformers {transformers.__version__} "
            f"does not have; choose a --task: {', '.join(TASKS)}"
        )
    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return lambda: auto.from_config(config)
    raise ConfigError(f"{request.config}: names no architectures; choose a --task: {', '.join(TASKS)}")


def _built(build: Callable[[], nn.Module], request: Request) -> nn.Module:
    """What ``build`` makes; a constructor fails on sizes that do not fit each other, or for want of a package."""
    try:
        return build()
    except Exception as error:
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigError(f"{request.config}: transformers cannot build this model: {why}") from error


# --- an example call -----------------------------------------------------------------------------------------------


def example_call(model: nn.Module, config: Any, request: Request) -> dict[str, Tensor | bool]:
    """Arguments for a forward of ``model``: its main input, what else it cannot do without, and labels to train."""
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    call: dict[str, Tensor | bool] = {main: _input(main, config, request)}
    for other in ("input_ids", "pixel_values"):  # a model of two towers compares both
        if other in takes and other not in call and _has_two_towers(config):
            call[other] = _input(other, config, request)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        call["decoder_input_ids"] = _tokens(config, request)
    if request.train:
        call.update(_labels(model, config, request, takes))
        if "use_cache" in takes:
            call["use_cache"] = False
    return call


def _has_two_towers(config: Any) -> bool:
    return hasattr(config, "vision_config") and hasattr(config, "projection_dim")


def _tokens(config: Any, request: Request) -> Tensor:
    return torch.randint(0, _of(config, 100, "vocab_size"), (request.batch, request.seq))


def _input(name: str, config: Any, request: Request) -> Tensor:
    """[batch, seq] tokens, [batch, channels, height, width] pixels, or what a model of sound takes."""
    if name == "input_ids":
        return _tokens(config, request)
    if name == "pixel_values":
        size = _of(config, 224, "image_size")
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return torch.randn(request.batch, _of(config, 3, "num_channels"), height, width, dtype=request.dtype)
    if name == "input_features":
        frames = 2 * _of(config, request.seq, "max_source_positions")
        return torch.randn(request.batch, _of(config, 80, "num_mel_bins", "feature_size"), frames, dtype=request.dtype)
    if name == "input_values":
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length") and not hasattr(config, "conv_dim"):
            return torch.randn(request.batch, config.max_length, config.num_mel_bins, dtype=request.dtype)
        return torch.randn(request.batch, 16000, dtype=request.dtype)  # a second of sound
    raise ConfigError(f"{request.config}: its main input is {name!r}, which no example is known for")


def _of(config: Any, otherwise: Any, *names: str) -> Any:
    """The first of ``names`` that the configuration, or one for a part of it, has a value for."""
    parts = [config, *(getattr(config, part, None) for part in ("text_config", "vision_config", "audio_config"))]
    values = (getattr(part, name, None) for part in parts if part is not None for name in names)
    return next((value for value in values if value is not None), otherwise)


def _labels(model: nn.Module, config: Any, request: Request, takes: Any) -> dict[str, Tensor]:
    """Targets of the shape that the model's head compares with; none for a model without a head."""
    kind = type(model).__name__
    classes = max(int(getattr(config, "num_labels", 2) or 2), 1)
    if "start_positions" in takes:
        return {name: torch.zeros(request.batch, dtype=torch.long) for name in ("start_positions", "end_positions")}
    if "labels" not in takes:
        return {}
    if "TokenClassification" in kind:
        return {"labels": torch.randint(0, classes, (request.batch, request.seq))}
    if "Classification" in kind:
        return {"labels": torch.randint(0, classes, (request.batch,))}
    if any(word in kind for word in ("CausalLM", "MaskedLM", "LMHead", "ConditionalGeneration")):
        return {"labels": _tokens(config, request)}
    return {}
