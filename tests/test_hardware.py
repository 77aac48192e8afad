"""The machines are values with sources, and the one probe refuses what it does not know."""

from __future__ import annotations

import pytest

import megamoe as mm
from megamoe.errors import NotAvailable, RangeError
from megamoe.hardware import H200, MACHINES, match

ALL = list(MACHINES.values())


def test_the_six_machines_are_there():
    assert set(MACHINES) == {"h100", "h200", "h20", "b200", "gb200", "b300"}


@pytest.mark.parametrize("hw", ALL, ids=lambda hw: hw.name)
def test_every_figure_is_positive_and_has_a_source(hw):
    for name, value, unit, source in hw.figures():
        assert value > 0, name
        assert unit and len(source) > 10, name
        assert source in str(hw)


@pytest.mark.parametrize("hw", ALL, ids=lambda hw: hw.name)
def test_nothing_reaches_more_than_its_paper_says(hw):
    for rate in (hw.hbm_gbs, hw.nvlink_gbs, *dict(hw.tensor_tflops).values()):
        assert 0.5 < rate.reached.value / rate.paper.value <= 1.0


def test_only_measured_figures_claim_to_be_measured():
    assert H200.hbm_gbs.reached.source.startswith("measured on one H200")
    for hw in ALL:
        if hw is not H200:
            rates = (hw.hbm_gbs, *dict(hw.tensor_tflops).values())
            assert all(rate.reached.source.startswith("not measured") for rate in rates)


def test_named_takes_any_case_and_lists_the_names_otherwise():
    assert mm.Hardware.named("H200") is H200
    with pytest.raises(RangeError, match=r"h100, h200, h20, b200, gb200, b300; got 'a100'"):
        mm.Hardware.named("a100")


def test_a_peak_that_a_machine_lacks_is_refused():
    assert H200.tensor("fp8").paper.value == 1979.0
    with pytest.raises(NotAvailable, match="multiplies bf16, fp8; got fp4"):
        H200.tensor("fp4")


@pytest.mark.parametrize(
    ("name", "sms", "expected"),
    [
        ("NVIDIA H200", 132, "h200"),
        ("NVIDIA H100 80GB HBM3", 132, "h100"),
        ("NVIDIA H20", 78, "h20"),
        ("NVIDIA B200", 148, "b200"),
        ("NVIDIA GB200", 152, "gb200"),
        ("NVIDIA B300 SXM6 AC", 148, "b300"),
    ],
)
def test_match_finds_the_row_of_a_device(name, sms, expected):
    assert match(name, sms).name == expected


@pytest.mark.parametrize(
    ("name", "sms"), [("NVIDIA H100 PCIe", 114), ("NVIDIA A100", 108), ("NVIDIA H20-3e", 78)]
)
def test_match_refuses_a_device_with_other_figures(name, sms):
    with pytest.raises(NotAvailable, match=rf"h200 \(132 SMs\).*got '{name}' with {sms} SMs"):
        match(name, sms)
