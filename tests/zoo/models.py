"""Every architecture of the whole-model tests, by its name."""

from __future__ import annotations

from tests.zoo.case import Architecture
from tests.zoo.decoders import DECODERS, EXPERTS
from tests.zoo.encoders import ENCODER_DECODERS, ENCODERS
from tests.zoo.torch_modules import TORCH
from tests.zoo.vision import SEVERAL_INPUTS, VISION

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for family in (DECODERS, EXPERTS, ENCODERS, ENCODER_DECODERS, VISION, SEVERAL_INPUTS, TORCH)
    for architecture in family
}
