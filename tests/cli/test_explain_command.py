"""`halfbyte explain`: layers, convolutions, attention and experts, on this CPU and on GPUs that are not here."""

from __future__ import annotations

import re

import pytest
import torch
from commands import Run

import halfbyte
from halfbyte.errors import UnsupportedError


def test_explain(run: Run) -> None:
    found = run("explain", "--m", 3, "--n", 64, "--k", 64, "--format", "int4_g32", "--no-measure", "--json").json
    assert (found["m"], found["n"], found["k"], found["format"]) == (3, 64, 64, "int4_g32")
    assert "kernel" in run("explain", "--no-measure").out
    # Of a small shape, too, every time has digits that say something.
    times = re.findall(r"(\S+) (?:us|ms)\b", run("explain", "--m", 1, "--n", 64, "--k", 64).out)
    assert len(times) == 4
    assert all(float(time) > 0 for time in times)
    found = run("explain", "--m", 6, "--n", 64, "--k", 64, "--experts", 4, "--json").json
    assert (found["op"], found["experts"], found["weight_bytes"]) == ("grouped_linear", 4, 4 * 2304)
    assert found["measured_seconds"] > 0
    run("explain", "--experts", 0).refuses("got 0")
    for rows in (1_000_000_000_000, 1 << 70):
        run("explain", "--m", rows).refuses("activations of", "GB in float32: ask for at most")
    run("explain", "--compute", "guess").refuses("'guess'")
    run("explain", "--format", "q9").refuses("'q9'")
    run("explain", "--m", "-1").refuses("-1")
    run("explain", "--n", 10**12).refuses("GB")


def test_explain_for_a_gpu_that_is_not_here(run: Run) -> None:
    found = run("explain", "--device", "sm_80", "--m", 3, "--n", 64, "--k", 64, "--format", "int4_g32", "--dtype", "float16", "--json").json
    assert found["arch"] == "sm_80"
    assert found["measured_seconds"] is None
    assert found["kernel"] not in found["rejected"]
    assert "compute='auto' is 'float' on a GPU" in found["rejected"].values()
    asked = run("explain", "--device", "sm_80", "--compute", "int8", "--json").json
    assert "compute='int8' was asked for" in asked["rejected"].values()
    assert "predicted" in run("explain", "--device", "sm_90").out
    run("explain", "--device", "abacus").refuses("'abacus'")
    run("explain", "--device", "sm_90", "--compute", "guess").refuses("'guess'")
    run("explain", "--device", "sm_90", "--m", 0).refuses("m=0")


def test_explain_other_shapes(run: Run) -> None:
    conv = ("--conv", 1, 64, 56, 56, "--weight", 64, 64, 3, 3, "--padding", 1, "--format", "int8_channel")
    for device in ("cpu", "sm_90"):
        found = run("explain", *conv, "--dtype", "int8", "--device", device, "--json").json
        assert found["op"] == "qconv2d"
        assert found["kernel"] not in found["rejected"]
        text = run("explain", *conv, "--dtype", "int8", "--device", device).out
        assert all(f"not {name}: {reason}" in text for name, reason in found["rejected"].items())
    asked = ("--attention", 1, 32, 8, 128, "--cache", "int8", "--dtype", "bfloat16", "--device", "sm_90")
    assert run("explain", *asked, "--json").json["kernel"] == "attend"
    assert run("explain", *asked, "--tokens", 100, "--json").json["kernel"] == "attend_many"
    assert run("explain", "--attention", 1, 4, 4, 64, "--tokens", 9, "--cache", "none", "--json").json["kernel"] == "attend_whole"
    found = run("explain", "--mixture", 1, 8, 2, 4096, 14336, "--device", "sm_90", "--json").json
    assert (found["kernel"], [*found["products"]]) == ("routing", ["gate_up", "down"])
    run("explain", "--conv", 1, 64, 56, 56).refuses("add --weight CO CI KH KW")
    run("explain", *conv, *asked).refuses("leave out the others")
    run("explain", "--dtype", "int8").refuses("float32, bfloat16 or float16")


def test_explain_takes_torchs_devices() -> None:
    assert halfbyte.explain(1, 64, 64, "q4_0", device=torch.device("cpu"), measured=False).to_json()["isa"]
    with pytest.raises(UnsupportedError, match="no kernels for device 'meta'"):
        halfbyte.explain(1, 64, 64, "q4_0", device=torch.device("meta"))
