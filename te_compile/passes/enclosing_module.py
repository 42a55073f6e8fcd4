"""The module that is being called while a graph is compiled: what the user handed to torch.compile.

A graph that follows a graph break is compiled when Python, running the model, gets there, and Dynamo names what is in
it by the variables of that frame alone. Who is calling whom stands in the frames of Python around it.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn
from torch._dynamo import eval_frame
from torch.fx import GraphModule

_CALLS = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)
_ENTRY = "compile_wrapper"  # what torch.compile puts around what it compiles
_ENTRY_FILE = eval_frame.__file__


def enclosing_module() -> nn.Module | None:
    """The outermost module whose call is under way, as far as torch.compile was asked to compile it; None outside of a
    module, and where a function was handed to torch.compile and no module is being called in it by Python."""
    outermost, is_inside = None, True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # By identity: Dynamo's code may hold what has no hash, as the globals of a closure that it makes anew.
        if any(code is each for each in _CALLS):
            module = frame.f_locals["self"]
            outermost = outermost if isinstance(module, GraphModule) else module
        elif code.co_filename == _ENTRY_FILE:
            is_inside = is_inside and code.co_name != _ENTRY
        elif not is_inside:
            break
        frame = frame.f_back
    # Without an entry this is no compilation of Dynamo's, and what calls it is no model of the user's.
    return None if is_inside else outermost
