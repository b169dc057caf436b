"""What an environment says of GPUs is understood as CUDA would, and not at all where it can't be."""

from __future__ import annotations

import pytest

from agent.collectors.interface import GpuProcesses
from agent.visible_devices import Visible, visible

GPUS = [
    GpuProcesses(0, "GPU-11111111-aaaa", ()),
    GpuProcesses(1, "GPU-22222222-bbbb", (), ("MIG-99999999-cccc",)),
    GpuProcesses(2, "GPU-22222223-dddd", ()),
    GpuProcesses(3, "GPU-44444444-eeee", None),
]
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3", **ORDER}, Visible((2, 3), True)),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, Visible((2, 3), False)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-44444444-eeee"}, Visible((3,), True)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-22222223"}, Visible((2,), True)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2222222"}, None),
        ({"CUDA_VISIBLE_DEVICES": "MIG-99999999-cccc"}, Visible((1,), True)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-11111111-aaaa/1/0"}, Visible((0,), True)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-77777777-cccc"}, None),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2", **ORDER}, Visible((1,), True)),
        ({"CUDA_VISIBLE_DEVICES": "1,7,2", **ORDER}, Visible((1,), True)),
        ({"CUDA_VISIBLE_DEVICES": "", **ORDER}, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, Visible((1,), True)),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0, 3"}, Visible((0, 3), True)),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0"}, Visible((2,), True)),
        ({"ROCR_VISIBLE_DEVICES": "1,3"}, Visible((1, 3), True)),
        ({"NVIDIA_VISIBLE_DEVICES": "2"}, None),
        ({}, None),
    ],
)
def test_a_process_of_this_host_sees(environment: dict[str, str], expected: Visible | None) -> None:
    assert visible(environment, GPUS, is_contained=False) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "1", **ORDER}, Visible((3,), True)),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-44444444-eeee,GPU-11111111-aaaa"}, Visible((0, 3), True)),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "2", **ORDER}, Visible((2,), True)),
        ({"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "0", **ORDER}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1", **ORDER}, None),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, Visible((3,), True)),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None),
    ],
)
def test_a_process_in_a_container_counts_the_containers_gpus(
    environment: dict[str, str], expected: Visible | None
) -> None:
    assert visible(environment, GPUS, is_contained=True) == expected


def test_where_the_gpus_of_the_host_are_not_known_an_index_is_taken_at_its_word() -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": "0,1"}, [], is_contained=False) == Visible((0, 1), False)
    assert visible({"CUDA_VISIBLE_DEVICES": "GPU-11111111-aaaa"}, [], is_contained=False) is None


def test_on_a_host_with_one_gpu_its_number_is_beyond_doubt() -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": "0"}, GPUS[:1], is_contained=False) == Visible((0,), True)
