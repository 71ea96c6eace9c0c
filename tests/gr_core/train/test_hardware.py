"""The machine's peak: by config, by name, by measurement; memory."""

import pytest
import torch

from gr_core.train import hardware

CPU = torch.device("cpu")


def test_the_config_overrules_the_machine():
    """train.peak_tflops is the peak, whatever the device could do."""
    assert hardware.peak(CPU, hardware.Terms(peak_tflops=2.5)) == hardware.Peak(2.5e12, "config")


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Some GPU of tomorrow", None),
    ],
)
def test_a_known_gpu_has_its_data_sheet(name, bf16):
    """The longest name that fits counts; an unknown one has none, so it is measured."""
    assert hardware.data_sheet(name, "bf16") == (bf16 and pytest.approx(bf16))


def test_fp32_on_tensor_cores_counts_only_where_torch_may_use_them(monkeypatch):
    """With full fp32 products the fp32 rate is the peak, with tf32 allowed the tf32 rate."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert hardware.data_sheet("NVIDIA H100", "fp32") == pytest.approx(66.9e12)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert hardware.data_sheet("NVIDIA H100", "fp32") == pytest.approx(494.7e12)


def test_the_cpu_is_measured():
    """A matrix product runs at more than a hundredth of a GFLOP/s and less than a PFLOP/s on any CPU."""
    found = hardware.peak(CPU, hardware.Terms())

    assert found.source == "measured"
    assert 1e7 < found.flops < 1e15


def test_peak_memory_is_what_was_held_at_once():
    """It stays when memory is given back, and covers main memory on the CPU."""
    before = hardware.peak_memory(CPU)
    held = torch.ones(before + 64 * 2**20, dtype=torch.uint8)
    size = held.numel()
    del held

    assert hardware.peak_memory(CPU) >= size
    assert hardware.peak_memory(CPU) == hardware.peak_host_memory()
