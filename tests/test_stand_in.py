"""Conversion, training and evaluation on another device than the CPU, with a stand-in for an
accelerator (support/stand_in.py): nothing reads tensors of two devices, and results are those of
the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support.repository import ROOT, SCRIPTS

EXTRA_BATCHES = 4  # of "many blocks"
CONVERSIONS = (
    "few blocks",
    "many blocks",
    "many blocks, full device",
    "refined and checked",
    "encoder-decoder",
    "aligned, with norms after attention and MLP",
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script prints; a process of its own, since torch keeps a device that it knows."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "on_stand_in.py", tmp_path_factory.mktemp("stand-in")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_tensors_of_two_devices_cannot_be_added(outcome: dict[str, Any]) -> None:
    """The control: a tensor that was not moved is noticed."""
    assert "reads tensors of two devices" in outcome["error of two devices"]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_on_a_device_is_that_of_the_cpu(outcome: dict[str, Any], name: str) -> None:
    assert outcome["conversions"][name]["difference"] < 2e-3


def test_hidden_states_stay_on_a_device_that_has_room(outcome: dict[str, Any]) -> None:
    """More text moves nothing more than its token ids, a tensor for each batch."""
    few = outcome["conversions"]["few blocks"]
    many = outcome["conversions"]["many blocks"]
    assert many["there"] - few["there"] == EXTRA_BATCHES
    assert many["back"] == few["back"]


def test_hidden_states_leave_a_device_that_is_full(outcome: dict[str, Any]) -> None:
    """They go there for every pass over the text, and come back from those that change them."""
    roomy = outcome["conversions"]["many blocks"]
    full = outcome["conversions"]["many blocks, full device"]
    assert full["there"] > 2 * roomy["there"]
    assert full["back"] > 2 * roomy["back"]


def test_training_on_a_device_is_that_of_the_cpu(outcome: dict[str, Any]) -> None:
    training = outcome["training"]
    assert training["standin"] > 0, "it was there"
    assert training["cpu"] == 0
    assert training["difference"] < 1e-4


def test_evaluation_on_a_device_is_that_of_the_cpu(outcome: dict[str, Any]) -> None:
    evaluation = outcome["evaluation"]
    assert evaluation["standin"] == pytest.approx(evaluation["cpu"], rel=1e-4)
