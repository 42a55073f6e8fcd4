"""State in files: saved and loaded whole or not at all, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from te_compile import state_files as module
from te_compile.state import StateError, state_of
from te_compile.state_files import load_state, load_state_dict, save_state, state_dict
from tests.compiling import compiled
from tests.states import LENGTH, fill, poll_often, same, scales_are_missing, two_layers, used

pytestmark = pytest.mark.usefixtures("nothing_waits")


# --- names ---------------------------------------------------------------------------------------------------------


def test_entries_bear_the_models_own_parameter_names() -> None:
    model = used(two_layers())
    entries = state_dict(model)
    assert list(entries) == ["0.weight.forward", "0.weight.backward", "1.weight.forward", "1.weight.backward"]
    assert torch.equal(entries["1.weight.forward"], state_of(model[1].weight, LENGTH).forward)


def test_state_dict_is_a_copy() -> None:
    model = used(two_layers())
    entries = state_dict(model)
    before = entries["0.weight.forward"].clone()
    state_of(model[0].weight, LENGTH).forward.zero_()
    assert torch.equal(entries["0.weight.forward"], before)


def test_the_models_own_state_dict_is_untouched() -> None:
    model = two_layers()
    before = list(model.state_dict())
    used(model)
    assert list(model.state_dict()) == before


def test_a_compiled_model_has_the_names_of_the_one_inside() -> None:
    model = used(two_layers())
    assert same(state_dict(torch.compile(model, backend="eager")), state_dict(model))


def test_a_model_with_compiled_parts_has_the_names_it_had_before() -> None:
    model = used(two_layers())
    entries = state_dict(model)
    model[1] = torch.compile(model[1], backend="eager")
    assert same(state_dict(model), entries)


def test_data_parallel_wrappers_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model = used(two_layers())
    entries = state_dict(model)
    assert same(state_dict(nn.DataParallel(model)), entries)
    assert same(state_dict(torch.compile(nn.DataParallel(model), backend="eager")), entries)
    assert same(state_dict(nn.DataParallel(torch.compile(model, backend="eager"))), entries)


def test_a_part_of_a_model_has_its_own_names() -> None:
    model = used(two_layers())
    assert list(state_dict(model[1])) == ["weight.forward", "weight.backward"]


def test_a_tied_weight_has_one_state_under_its_first_name() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    used(model)
    entries = state_dict(model)
    assert list(entries) == ["embedding.weight.forward", "embedding.weight.backward"]
    renamed = {name.replace("embedding", "head"): tensor + 1 for name, tensor in entries.items()}
    load_state_dict(model, renamed)
    assert torch.equal(state_dict(model)["embedding.weight.forward"], entries["embedding.weight.forward"] + 1)


def test_states_of_two_history_lengths_are_both_kept() -> None:
    model = used(used(nn.Sequential(nn.Linear(4, 4)), 3), 8)
    entries = state_dict(model)
    assert set(entries) == {f"0.weight.{way}.{length}" for way in ("forward", "backward") for length in (3, 8)}
    other = nn.Sequential(nn.Linear(4, 4))
    load_state_dict(other, entries)
    assert same(state_dict(other), entries)


# --- saving and loading --------------------------------------------------------------------------------------------


def test_a_saved_state_comes_back_bit_exact_before_the_first_compiled_call(tmp_path: Path) -> None:
    model = used(two_layers())
    save_state(model, tmp_path / "state.safetensors")
    other = two_layers()
    load_state(other, tmp_path / "state.safetensors")
    assert same(state_dict(other), state_dict(model))
    assert same(state_dict(model), state_dict(other))
    state = state_of(other[0].weight, LENGTH, training=True)
    assert torch.equal(state.forward, state_of(model[0].weight, LENGTH).forward)


def test_loading_writes_into_the_tensors_that_exist(tmp_path: Path) -> None:
    model = used(two_layers())
    saved = state_dict(model)
    save_state(model, tmp_path / "state.safetensors")
    state = state_of(model[0].weight, LENGTH)
    forward, backward = state.forward, state.backward
    fill(state)
    load_state(torch.compile(model, backend="eager"), str(tmp_path / "state.safetensors"))
    assert state_of(model[0].weight, LENGTH).forward is forward and state.backward is backward
    assert same(state_dict(model), saved)


def test_a_loaded_scale_needs_no_waiting_and_a_missing_one_does() -> None:
    model = used(two_layers())
    entries = state_dict(model)
    poll_often()
    load_state_dict(model, entries)
    assert not scales_are_missing()
    entries["1.weight.backward"][:, 0] = 0
    load_state_dict(model, entries)
    assert scales_are_missing()
    state_of(model[1].weight, LENGTH).backward[:, 0] = 1
    poll_often()
    assert not scales_are_missing()


def test_the_file_is_plain_safetensors_that_says_what_it_is(tmp_path: Path) -> None:
    model = used(two_layers())
    save_state(model, tmp_path / "state.safetensors")
    assert same(safetensors.torch.load_file(tmp_path / "state.safetensors"), state_dict(model))
    with safe_open(tmp_path / "state.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["format_version"]) == ("te_compile.state", "1")
    assert metadata["history_length"] == str(LENGTH) and metadata["te_compile_version"]


def test_a_model_without_state_saves_and_loads_an_empty_file(tmp_path: Path) -> None:
    save_state(two_layers(), tmp_path / "state.safetensors")
    load_state(two_layers(), tmp_path / "state.safetensors")
    with pytest.raises(StateError, match=r"missing entry '0.weight.forward'"):
        load_state(used(two_layers()), tmp_path / "state.safetensors")


def test_a_save_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = used(two_layers())
    path = tmp_path / "state.safetensors"
    save_state(model, path)
    before = path.read_bytes()
    fill(state_of(model[0].weight, LENGTH))

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_state(model, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# --- what does not fit ---------------------------------------------------------------------------------------------


def refused(model: nn.Module, entries: dict[str, Tensor], strict: bool = True) -> str:
    """The error of loading ``entries``, which must leave the model's state as it was."""
    before = state_dict(model)
    with pytest.raises(StateError) as error:
        load_state_dict(model, entries, strict=strict)
    assert same(state_dict(model), before)
    return str(error.value)


def other_entries(model: nn.Module) -> dict[str, Tensor]:
    """Entries that fit ``model`` and differ from its own."""
    return {name: tensor + 1 for name, tensor in state_dict(model).items()}


def test_missing_and_unexpected_entries_are_named() -> None:
    model = used(two_layers())
    entries = other_entries(model)
    del entries["0.weight.forward"], entries["0.weight.backward"]
    entries["2.weight.forward"] = entries["1.weight.forward"]
    entries["2.weight.backward"] = entries["1.weight.backward"]
    entries["1.weight"] = entries["1.weight.forward"]
    message = refused(model, entries)
    assert "missing entry '0.weight.forward'" in message and "missing entry '0.weight.backward'" in message
    assert "unexpected entry '2.weight.forward'" in message and "'1.weight' is not named" in message


def test_half_a_pair_is_a_missing_entry() -> None:
    model = used(two_layers())
    entries = other_entries(model)
    del entries["1.weight.backward"]
    assert "missing entry '1.weight.backward'" in refused(model, entries)
    assert "missing entry '1.weight.backward'" in refused(two_layers(), entries)


def test_a_state_of_a_second_history_length_is_missing_from_a_file_of_one() -> None:
    model, x = nn.Linear(32, 32), torch.randn(8, 32)
    for length in (4, 8):
        compiled(model, recipe={"name": "delayed", "amax_history_len": length})(x).sum().backward()
    entries = {name.removesuffix(".8"): entry for name, entry in state_dict(model).items() if name.endswith(".8")}
    assert "missing entry 'weight.forward.4'" in refused(model, entries)
    load_state_dict(model, entries, strict=False)


def test_without_strict_what_fits_is_loaded_and_the_rest_stays() -> None:
    model = used(two_layers())
    mine, entries = state_dict(model), other_entries(model)
    del entries["0.weight.forward"], entries["0.weight.backward"]
    entries["2.weight.forward"] = entries["1.weight.forward"]
    entries["2.weight.backward"] = entries["1.weight.backward"]
    load_state_dict(model, entries, strict=False)
    now = state_dict(model)
    assert torch.equal(now["0.weight.forward"], mine["0.weight.forward"])
    assert torch.equal(now["1.weight.forward"], entries["1.weight.forward"])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.double(), "has type torch.float64, must be torch.float32"),
        (lambda t: t.int(), "has type torch.int32"),
        (lambda t: t[0], "has shape [7], must be [2, 2 + history length]"),
        (lambda t: t[:1], "has shape [1, 7], must be [2, 2 + history length]"),
        (lambda t: t[:, :2], "has shape [2, 2]"),
        (lambda t: t * float("nan"), "non-finite"),
        (lambda t: -t, "negative"),
    ],
)
def test_a_wrong_entry_is_named_with_what_is_wrong(change: object, message: str, strict: bool) -> None:
    model = used(two_layers())
    entries = other_entries(model)
    entries["1.weight.forward"] = change(entries["1.weight.forward"])
    error = refused(model, entries, strict)
    assert "entry '1.weight.forward'" in error and message in error


def test_entries_of_one_parameter_must_agree_in_history_length() -> None:
    entries = state_dict(used(two_layers()))
    entries["0.weight.forward"] = torch.ones(2, 2 + LENGTH + 1)
    message = refused(two_layers(), entries)
    assert "'0.weight.forward' and '0.weight.backward' differ in history length" in message


def test_another_history_length_than_the_models_is_refused() -> None:
    entries = state_dict(used(two_layers(), 16))
    message = refused(used(two_layers(), 3), entries)
    assert "entry '0.weight.forward' has shape [2, 18], the model's is [2, 5]" in message
    assert "amax_history_len is 16 there and 3 here" in message


def test_a_loaded_state_that_the_recipe_cannot_use_is_not_lost_in_silence() -> None:
    model = two_layers()
    load_state_dict(model, state_dict(used(two_layers(), 16)))
    with pytest.raises(StateError, match=r"amax_history_len=16, but the recipe asks for 3"):
        state_of(model[0].weight, 3)
    load_state_dict(model, state_dict(used(two_layers(), 3)))
    assert state_of(model[0].weight, 3).history_length == 3


def test_two_names_of_one_tied_parameter_cannot_both_have_entries() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    entries = state_dict(used(model))
    model["b"].weight = model["a"].weight
    assert "'a.weight.forward' and 'b.weight.forward' are for one tied parameter" in refused(model, entries)


def test_a_long_list_of_mismatches_is_cut() -> None:
    deep = used(nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)]))
    message = refused(nn.Linear(2, 2), state_dict(deep))
    assert "and 40 more" in message and len(message.splitlines()) == 22


# --- bad files -----------------------------------------------------------------------------------------------------


def test_a_file_cut_at_any_place_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model = used(two_layers())
    path = tmp_path / "state.safetensors"
    save_state(model, path)
    whole = path.read_bytes()
    before = state_dict(used(model))
    header = int.from_bytes(whole[:8], "little")
    for length in [0, 1, 7, 8, 9, 8 + header // 2, 8 + header - 1, 8 + header, 8 + header + 5, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(StateError) as error:
            load_state(model, path)
        found = f"{length} bytes, the file is truncated" if length else "an empty file"
        assert f"{path}: found {found}" in str(error.value)
        assert same(state_dict(model), before)


def test_foreign_files_are_refused_with_what_they_are(tmp_path: Path) -> None:
    model = used(two_layers())
    text, pickled, weights = tmp_path / "text", tmp_path / "pickled", tmp_path / "weights"
    text.write_text("loss=1.0\n" * 100)
    torch.save(state_dict(model), pickled)
    safetensors.torch.save_file(model.state_dict(), weights)
    for path, found in [
        (text, "900 bytes, the file is truncated or foreign"),
        (pickled, f"a zip archive of {pickled.stat().st_size} bytes, as torch.save writes them"),
        (weights, "a safetensors file of 4 tensors with format=None"),
        (tmp_path, "a directory"),
    ]:
        with pytest.raises(StateError) as error:
            load_state(model, path)
        assert str(error.value).startswith(f"{path}: found {found}")


def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    model = used(two_layers())
    metadata = {"format": "te_compile.state", "format_version": "2", "te_compile_version": "9.9"}
    safetensors.torch.save_file(state_dict(model), tmp_path / "later", metadata)
    with pytest.raises(StateError, match=r"version '2' of the format, written by te_compile 9\.9.* reads version '1'"):
        load_state(model, tmp_path / "later")


def test_what_is_no_state_is_refused_by_its_type() -> None:
    with pytest.raises(StateError, match="is of type list, must be"):
        load_state_dict(two_layers(), [])
    with pytest.raises(StateError, match=r"entry '0\.weight\.forward' is of type list, must be a tensor"):
        load_state_dict(two_layers(), {"0.weight.forward": [1.0]})
    with pytest.raises(StateError, match=r"entry 3 is not named <parameter>\.forward or"):
        load_state_dict(two_layers(), {3: torch.ones(1)})
    with pytest.raises(TypeError, match=r"strict='x': must be True or False"):
        load_state_dict(two_layers(), {}, strict="x")


@pytest.mark.parametrize("call", [state_dict, lambda each: load_state_dict(each, {})])
def test_a_function_has_no_state(call: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"expected a module.* not function"):
        call(lambda x: x)


@pytest.mark.parametrize("call", [save_state, load_state])
def test_what_is_no_path_is_refused_by_its_name(call: Callable[[nn.Module, object], object]) -> None:
    with pytest.raises(TypeError, match=r"path is of type NoneType, must be a str"):
        call(two_layers(), None)
    with pytest.raises(TypeError, match=r"path is of type int, must be a str"):
        call(two_layers(), 3)
    with pytest.raises(ValueError, match=r"path is '', must name a file"):
        call(two_layers(), "")


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory") as error:
        save_state(used(two_layers()), tmp_path / "none" / "state")
    assert error.value.filename == str(tmp_path / "none")


def test_a_directory_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a directory, and the FP8 state is saved in a file") as error:
        save_state(used(two_layers()), tmp_path)
    assert error.value.filename == str(tmp_path) and not list(tmp_path.parent.glob("*unfinished"))


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_state(two_layers(), tmp_path / "none")


def test_a_mismatch_in_a_file_names_the_file(tmp_path: Path) -> None:
    save_state(used(two_layers()), tmp_path / "state")
    with pytest.raises(StateError) as error:
        load_state(nn.Linear(4, 6), tmp_path / "state")
    assert str(tmp_path / "state") in str(error.value) and "unexpected entry '0.weight.forward'" in str(error.value)


def test_a_model_without_weights_yet_is_told_to_load_them_first() -> None:
    entries = state_dict(used(two_layers()))
    with torch.device("meta"):
        model = two_layers()
    with pytest.raises(StateError, match=r"parameter '1\.weight' is on the meta device: load its weights first"):
        load_state_dict(model, entries)
    assert state_dict(model) == {}
