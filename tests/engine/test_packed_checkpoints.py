"""GPTQ and AWQ checkpoints, packed here bit by bit as their formats say, give the weights that their numbers stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints.find import open_checkpoint
from engine.checkpoints.packed import Packing
from engine.modelconfig import UnsupportedModel
from tests.engine.checkpoints import write_checkpoint
from tests.engine.test_families import load, logits_of

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs: which four bits of the word are theirs


def word_of(numbers: list[int], bits: int, places: tuple[int, ...] | None = None) -> int:
    word = 0
    for at, number in enumerate(numbers):
        word |= number << (bits * (at if places is None else places[at]))
    return word - (1 << 32) if word >= 1 << 31 else word  # as int32


def along_rows(numbers: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    each = 32 // bits
    rows = [[word_of(row[at : at + each], bits, places) for at in range(0, len(row), each)] for row in numbers.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def packed_folder(folder: Path, stated: dict[str, Any], shuffled: bool = False, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint whose matrices are packed, and one with the full weights that these stand for."""
    plain = write_checkpoint(folder / "plain", seed=4, **changes)
    bits, group = stated["bits"], stated["group_size"]
    less = 1 if stated["quant_method"] == "gptq" and stated.get("checkpoint_format") != "gptq_v2" else 0
    generator = torch.Generator().manual_seed(1)
    full, kept = dict(load_file(plain / "model.safetensors")), {}
    for name, tensor in list(full.items()):
        if "_proj.weight" not in name:
            kept[name] = tensor
            continue
        outputs, inputs = tensor.shape
        size = inputs if group == -1 else group
        groups = -(-inputs // size)
        numbers = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
        zeros = torch.randint(0, 1 << bits, (groups, outputs), generator=generator)
        if stated.get("sym"):
            zeros.fill_(1 << bits - 1)
        step = (torch.rand(groups, outputs, generator=generator) * 0.02 * 16 / (1 << bits) + 0.001).half()
        of_input = torch.arange(inputs) // size
        if shuffled:
            of_input = of_input[torch.randperm(inputs, generator=generator)]
        whole = name.removesuffix(".weight")
        if stated["quant_method"] == "awq":
            kept[f"{whole}.qweight"] = along_rows(numbers, 4, AWQ_PLACES)
            kept[f"{whole}.qzeros"] = along_rows(zeros, 4, AWQ_PLACES)
        else:
            kept[f"{whole}.qweight"] = along_rows(numbers.T, bits).T.contiguous()
            kept[f"{whole}.qzeros"] = along_rows((zeros - less) % (1 << bits), bits)
            if shuffled:
                kept[f"{whole}.g_idx"] = of_input.int()
        kept[f"{whole}.scales"] = step
        full[name] = torch.tensor(
            [
                [float(step[of_input[i], o]) * int(numbers[i, o] - zeros[of_input[i], o]) for i in range(inputs)]
                for o in range(outputs)
            ]
        )
    save_file(full, plain / "model.safetensors", metadata={"format": "pt"})
    packed = write_checkpoint(folder / "packed", seed=4, quantization_config=stated, **changes)
    save_file(kept, packed / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


@pytest.mark.parametrize(
    ("stated", "shuffled"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, True),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}, False),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, False),
    ],
    ids=["awq", "gptq", "gptq in another order", "gptq v2, one group", "gptq, 8 bits, a last group that isn't full"],
)
def test_packed_weights_are_those_that_their_numbers_stand_for(
    stated: dict[str, Any], shuffled: bool, tmp_path: Path
) -> None:
    packed, plain = packed_folder(tmp_path, stated, shuffled)
    whole, parts = open_checkpoint(plain), open_checkpoint(packed)
    for name in load_file(plain / "model.safetensors"):
        torch.testing.assert_close(parts.tensor(name), whole.tensor(name), rtol=1e-6, atol=1e-7)
    tokens = list(range(30))
    torch.testing.assert_close(logits_of(load(packed), tokens, [30], []), logits_of(load(plain), tokens, [30], []))


def test_the_numbers_of_an_awq_word_go_to_every_other_output() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    parts = {"qweight": word, "qzeros": torch.zeros(1, 1, dtype=torch.int32), "scales": torch.ones(1, 8)}
    packing = Packing.of({"quant_method": "awq", "bits": 4, "group_size": -1})
    assert packing.matrix("m", parts.get).weight().flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; supported: awq, gptq"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "awq weights of 8 bits"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq weights of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "in the form 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "'marlin'"),
    ],
)
def test_another_packing_is_refused_by_its_name(stated: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(write_checkpoint(tmp_path, quantization_config=stated))


@pytest.mark.parametrize(
    ("part", "broken", "message"),
    [
        ("qzeros", None, r"no tensor model\.layers\.1\.self_attn\.v_proj\.qzeros"),
        ("scales", torch.ones(1, 16), r"v_proj: scales \[1, 16\] and zeros \[2, 16\] don't fit 32 inputs"),
        ("qweight", torch.ones(4, 16), r"v_proj\.qweight: torch\.float32"),
        ("g_idx", torch.full((32,), 2, dtype=torch.int32), "doesn't name one of the 2 groups"),
    ],
)
def test_a_packed_matrix_whose_parts_do_not_fit_is_named(
    part: str, broken: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    packed, _ = packed_folder(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 16})
    tensors = load_file(packed / "model.safetensors")
    name = f"model.layers.1.self_attn.v_proj.{part}"
    tensors.pop(name, None)
    save_file(tensors if broken is None else tensors | {name: broken}, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        load(packed)


def test_an_index_without_a_map_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors\.index\.json: no weight_map"):
        open_checkpoint(folder)
