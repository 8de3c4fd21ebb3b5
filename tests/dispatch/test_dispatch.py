"""The choice of a GPU kernel: candidates, predictions, measured times and tables."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from halfbyte import env
from halfbyte.dispatch import explain_gpu, tune
from halfbyte.dispatch import gpu as rules
from halfbyte.dispatch.choose import choose, forget, report_failure
from halfbyte.dispatch.explain import explain
from halfbyte.dispatch.explain_gpu import GpuExplanation
from halfbyte.dispatch.measure import compile_launches
from halfbyte.dispatch.packed import packed_format
from halfbyte.dispatch.roofline import COST_MODELS, Tiles, gpu_ceilings, predict
from halfbyte.errors import ArgumentError, KernelError, UnsupportedError
from halfbyte.formats.spec import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.linear import plain
from halfbyte.kernels.gpu.runtime import launch
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu
from halfbyte.quantizers import absmax

KINDS = {
    "w4_none_b128": "int4_g128", "w4_point_b128": "int4_g128_zp", "w4_none_b32": "q4_0",
    "w8_none_b32": "q8_0", "w8_none_row": "int8_channel", "w4_none_row": "int4_channel",
}  # fmt: skip


def problem(
    m: int, n: int = 4032, k: int = 4096, fmt: str = "int4_g128", compute: str = "float", dtype: torch.dtype = torch.float16
) -> Problem:
    return Problem("linear", m, n, k, as_format(fmt), dtype, compute, "row" if compute == "int8" else "block")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """No table of this machine is seen, and what a test measures is forgotten."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    clear()
    yield
    clear()


def clear() -> None:
    tune._table.cache_clear()
    tune._shipped.cache_clear()
    tune._unsaved.clear()
    rules._failures.clear()
    forget()


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("compute", ["float", "int8"])
def test_every_architecture_has_a_kernel_for_everything(arch: str, compute: str) -> None:
    for fmt in ("q4_0", "q4_1", "q8_0", "int4_g128", "int4_g48_offset", "int8_channel", "int8_g33_zp", "int4_tensor"):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for m, n, k in ((1, 1, 1), (1, 4096, 4096), (7, 33, 100), (128, 512, 512), (129, 512, 512), (5000, 64, 640)):
                choice = choose(problem(m, n, k, fmt, compute, dtype), GPUS[arch])
                assert choice.taken is not None
                assert choice.taken.candidate.compute == compute
                names = {option.candidate.name for option in (choice.taken, *choice.others)} | {c.name for c, _ in choice.rejected}
                assert names == {candidate.name for candidate in rules.GPU_LINEAR if not candidate.sparse}


def test_the_fastest_expected_is_taken_and_each_candidate_is_rated() -> None:
    assert {candidate.name for candidate in rules.GPU_LINEAR} == set(COST_MODELS)
    choice = choose(problem(64), GPUS["sm_90"])
    assert choice.taken is not None
    assert all(choice.taken.seconds <= other.seconds for other in choice.others)
    assert all(reason for _, reason in choice.rejected)


def test_predictions_grow_with_the_work() -> None:
    gpu = GPUS["sm_90"]
    for name in COST_MODELS:
        times = [predict(problem(m, 8192, 8192), gpu, name, Tiles(16, 64)) for m in (1, 16, 256, 4096)]
        assert times == sorted(times)
        assert times[0] > 8192 * 8192 / 2 / gpu_ceilings(gpu).bandwidth
        one_wave, two = (predict(problem(4096, 128 * tiles, 4096), gpu, name, Tiles(4096, 128)) for tiles in (gpu.sms, gpu.sms + 1))
        assert two > 1.5 * one_wave


@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "sm_90"])
@pytest.mark.parametrize("fmt", ["int4_g128", "q8_0"])
def test_where_nothing_was_measured_the_choice_is_sound(arch: str, fmt: str) -> None:
    """More rows never look cheaper; few are read with the weight, many go to the library."""
    for n, k in ((4096, 4096), (28672, 8192), (151936, 896)):
        taken = [choose(problem(1 << i, n, k, fmt), GPUS[arch]).taken for i in range(14)]
        assert all(option is not None and not option.measured for option in taken)
        seconds = [option.seconds for option in taken if option is not None]
        slack = 1.01 if GPUS[arch].backend == "cuda" else 1.6  # AMD's matrix units have 16 columns at least
        assert all(later * slack >= earlier for earlier, later in pairwise(seconds))
        assert [option.candidate.name for option in (taken[0], taken[-1]) if option is not None] == ["skinny", "dequantized"]


@pytest.mark.parametrize("fmt", ["int4_g128", "q4_0", "q8_0"])
def test_layers_of_models_are_multiplied_by_kernels_on_hopper(fmt: str) -> None:
    """What torch multiplied would keep the launches of a layer from being replayed together."""
    rows = [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 96, 128, 129, 192, 256, 257, 300, 512, 513, 700, 1024, 2048, 4096]
    for n, k in ((1024, 4096), (2560, 9728), (3072, 8192), (5120, 2048), (6144, 2560), (28672, 4096)):
        taken = [choose(problem(m, n, k, fmt, dtype=torch.bfloat16), GPUS["sm_90"]).taken for m in rows]
        assert all(option is not None and option.candidate.replayable for option in taken)
        seconds = [option.seconds for option in taken if option is not None and not option.measured]
        assert all(later >= 0.97 * earlier for earlier, later in pairwise(seconds))


def test_ceilings_come_from_the_clocks_or_from_a_relative() -> None:
    gpu = GPUS["sm_90"]
    slow = dataclasses.replace(gpu, clock=(gpu.clock or 0) / 2, bandwidth=(gpu.bandwidth or 0) / 2)
    assert gpu_ceilings(slow).half == pytest.approx(gpu_ceilings(gpu).half / 2)
    assert gpu_ceilings(slow).bandwidth == pytest.approx(gpu_ceilings(gpu).bandwidth / 2)
    unknown = Gpu("new", "cuda", (11, 0), "sm_110", 100, 1 << 26, 200 << 10, 1 << 36)
    assert gpu_ceilings(unknown).half > 0


def test_what_was_measured_decides() -> None:
    gpu, asked = GPUS["sm_90"], problem(100)
    before = choose(asked, gpu)
    assert before.taken is not None
    assert not before.taken.measured
    [*_, last] = before.others or (before.taken,)
    config = str(last.candidate.module.configs(asked, gpu)[-1])
    tune.keep(gpu, problem(128), {last.candidate.name: {config: 1e-9}})
    forget()
    after = choose(asked, gpu).taken
    assert after is not None
    assert (after.candidate.name, str(after.config), after.seconds, after.measured) == (last.candidate.name, config, 1e-9, gpu.name)
    other = choose(problem(300), gpu).taken
    assert other is not None
    assert not other.measured


def test_what_fails_here_is_passed_over_and_explained() -> None:
    gpu, asked = GPUS["sm_90"], problem(1)
    first = choose(asked, gpu).taken
    assert first is not None
    report_failure(asked, gpu, first, "no room")
    second = choose(asked, gpu)
    assert second.taken is None or str(second.taken.config) != str(first.config)
    assert (first.candidate, f"{first.config} failed: no room") in second.rejected
    assert "no room" in str(explain(1, 4032, 4096, "int4_g128", dtype=torch.float16, device="sm_90"))
    assert choose(problem(1), GPUS["sm_80"]).taken is not None


def test_a_table_is_readable_and_a_broken_one_is_passed_over(tmp_path: Path) -> None:
    gpu = GPUS["sm_90"]
    tune.keep(gpu, problem(1), {"skinny": {"Config()": 2e-5}})
    tune.keep(gpu, problem(3), {"skinny": {"Config()": 3e-5}})
    path = tune.table_path(gpu)
    assert path.parent.parent == tmp_path
    assert json.loads(path.read_text())["linear"] == {
        "w4_none_b128 float16 float 4032x4096": {"1": {"skinny": {"Config()": 2e-5}}, "4": {"skinny": {"Config()": 3e-5}}}
    }
    assert tune.measured(gpu, problem(4)) == ({"skinny": {"Config()": 3e-5}}, gpu.name)
    assert not tune.measured(gpu, problem(8)).times
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    for text in ("", "{", "[]", '{"linear": 3}', '{"linear": {"a": {"1": {"skinny": {"Config()": -1.0}}}}}'):
        path.write_text(text)
        clear()
        with pytest.warns(UserWarning, match="not a table of times.*passed over"):
            assert not tune.measured(gpu, problem(1)).times
        with pytest.warns(UserWarning, match=r"are not written \(.* is not a table of times.*: delete it\)"):
            tune.keep(gpu, problem(1), {"skinny": {"Config()": 4e-5}})
        assert tune.measured(gpu, problem(1)).times == {"skinny": {"Config()": 4e-5}}  # in this process
        assert path.read_text() == text  # as somebody may have edited it
        assert tune.written(gpu) is None


def test_the_table_of_another_gpu_is_passed_over() -> None:
    gpu = GPUS["sm_90"]
    tune.keep(GPUS["sm_80"], problem(1), {"skinny": {"Config()": 2e-5}})
    os.rename(tune.written(GPUS["sm_80"]), tune.table_path(gpu))
    with pytest.warns(UserWarning, match=f"is a table of times of '{GPUS['sm_80'].name}', not of {gpu.name}: delete it; it is passed over"):
        assert not tune.measured(gpu, problem(1), here=True).times
    tune.table_path(gpu).unlink()  # as advised
    clear()
    assert not tune.measured(gpu, problem(1), here=True).times
    tune.keep(gpu, problem(1), {"skinny": {"Config()": 3e-5}})
    assert tune.measured(gpu, problem(1), here=True).times == {"skinny": {"Config()": 3e-5}}


@pytest.mark.parametrize("fault", ["no home", "read-only"])
def test_times_that_cannot_be_written_are_known_to_the_process(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GPUS["sm_90"]
    if fault == "no home":
        monkeypatch.setattr(env, "cache", lambda: None)
    else:
        (tmp_path / "tune").write_text("")  # a file, where the folder would be made
    with pytest.warns(UserWarning, match="times of .* are not written .*HALFBYTE_CACHE names a usable folder"):
        tune.keep(gpu, problem(1), {"skinny": {"Config()": 2e-5}})
    tune.keep(gpu, problem(2), {"skinny": {"Config()": 3e-5}})  # a second warning would be an error
    for m, seconds in ((1, 2e-5), (2, 3e-5)):
        assert tune.measured(gpu, problem(m), here=True).times == {"skinny": {"Config()": seconds}}
    assert tune.written(gpu) is None


def test_two_threads_keep_times_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, replace = GPUS["sm_90"], os.replace

    def after_another_thread(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        tune.keep(gpu, problem(2), {"skinny": {"Config()": 3e-5}})
        replace(source, target)

    monkeypatch.setattr(os, "replace", after_another_thread)
    tune.keep(gpu, problem(1), {"skinny": {"Config()": 2e-5}})
    assert tune.measured(gpu, problem(1)).times == {"skinny": {"Config()": 2e-5}}  # the later one wins
    assert len(list(tune.table_path(gpu).parent.iterdir())) == 1


def test_times_and_failures_of_other_codes_and_scales() -> None:
    """Formats whose kernels differ have times and failures of their own; those of plain integers stand in until there are some."""
    gpu, names = GPUS["sm_90"], ("q4_0", "int4_g32_bf16", "mxfp4", "iq4_nl")
    problems = {name: dataclasses.replace(problem(1), format=as_format(name)) for name in names}
    assert len({tune.kind(one) for one in problems.values()}) == len(names)
    tune.keep(gpu, problems["q4_0"], {"skinny": {"Config()": 1.0}})
    assert {tune.measured(gpu, one).times["skinny"]["Config()"] for one in problems.values()} == {1.0}
    for seconds, one in enumerate(problems.values(), 1):
        tune.keep(gpu, one, {"skinny": {"Config()": float(seconds)}})
    assert [tune.measured(gpu, one).times["skinny"]["Config()"] for one in problems.values()] == [1.0, 2.0, 3.0, 4.0]


def test_the_tables_in_the_package_are_sound_and_fit_the_kernels() -> None:
    """A config that a kernel no longer has is a number that nobody reads."""
    for path in tune._TABLES.glob("*.json"):
        table = tune._read(path)
        here = dataclasses.replace(GPUS[table["arch"]], name=table["gpu"], sms=table["sms"], bandwidth=table["bandwidth"])
        assert tune._shipped(here)[0] == path
        for kind, by_rows in table["linear"].items():
            weight, dtype, way, shape = kind.split(" ")
            n, k = map(int, shape.split("x"))
            for m, times in by_rows.items():
                asked = problem(int(m), n, k, KINDS[weight], way.split("_")[0], getattr(torch, dtype))
                assert tune.kind(asked) == kind
                for candidate in rules.GPU_LINEAR:
                    known = {_settled(config) for config in candidate.module.configs(asked, here)}
                    assert {_settled(config) for config in times.get(candidate.name, {})} <= known
                assert set(times) <= {candidate.name for candidate in rules.GPU_LINEAR}


def test_few_rows_are_predicted_as_they_were_measured() -> None:
    """The kernel that would be taken without the H200's table is within 5 % of the best nearly everywhere."""
    gpu, near = GPUS["sm_90"], []
    for kind, by_rows in tune._read(tune._TABLES / "h200.json")["linear"].items():
        weight, dtype, way, shape = kind.split(" ")
        n, k = map(int, shape.split("x"))
        for m, times in by_rows.items():
            if way == "float" and int(m) <= 64:
                asked = problem(int(m), n, k, KINDS[weight], dtype=getattr(torch, dtype))
                rated = {}
                for candidate in rules.GPU_LINEAR:
                    if candidate.name in times:
                        first = candidate.module.configs(asked, gpu)[0]
                        rated[candidate.name] = predict(asked, gpu, candidate.name, candidate.tiles(first, asked))
                best = {name: min(of_configs.values()) for name, of_configs in times.items()}
                near.append(best[min(rated, key=lambda name: rated[name])] <= 1.05 * min(best.values()))
    assert sum(near) > 0.98 * len(near) > 200


def test_a_table_serves_its_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_TABLES", tmp_path / "shipped")
    gpu, asked = GPUS["sm_90"], problem(1)
    slow = dataclasses.replace(gpu, name="slow", bandwidth=3.3e12)
    for one in (gpu, slow, dataclasses.replace(gpu, name="small", sms=114)):
        tune.keep(one, asked, {"skinny": {"Config()": 1e-5}}, tune._TABLES / f"{one.name}.json")
    tune.keep(slow, problem(2), {"skinny": {"Config()": 2e-5}}, tune._TABLES / "slow.json")
    like = [("NVIDIA H200", None), ("NVIDIA GH200 480GB", 4.9e12), ("NVIDIA H100 NVL", 3.9e12), ("slow", 4.8e12)]
    found = [tune.measured(dataclasses.replace(gpu, name=name, bandwidth=bandwidth), asked).gpu for name, bandwidth in like]
    assert found == ["NVIDIA H200", "NVIDIA H200", "slow", "slow"]
    assert tune.measured(gpu, problem(2)).gpu == "slow"  # better than nothing
    assert not tune.measured(dataclasses.replace(gpu, sms=100), asked).times


def _settled(config: object) -> str:
    """Without what the interpreter switches off."""
    return re.sub(r"(ptx|pdl|asm|ahead)=\w+", "", str(config))


def test_halves_stand_in_for_each_other() -> None:
    gpu = GPUS["sm_90"]
    tune.keep(gpu, problem(1), {"skinny": {"Config()": 2e-5}})
    assert tune.measured(gpu, problem(1, dtype=torch.bfloat16)).times == {"skinny": {"Config()": 2e-5}}
    assert not tune.measured(gpu, problem(1, dtype=torch.float32)).times


def test_what_does_not_compile_is_left_out_of_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    together, built = [False], []

    @contextmanager
    def compiling(device: torch.device) -> Iterator[None]:
        together[0] = True
        yield
        together[0] = False

    def fails() -> None:
        built.append(("b", *together))
        if not together[0]:
            raise KernelError("not for this GPU")

    monkeypatch.setattr(launch, "compiling", compiling)
    contenders: dict[str, list[Callable[[], object]]] = {"a\nConfig(1)": [lambda: built.append(("a", *together))], "b\nConfig(2)": [fails]}
    with pytest.warns(UserWarning, match=r"^b Config\(2\) does not run here, and is left out: not for this GPU$"):
        compile_launches(contenders, torch.device("cuda", 0))
    assert list(contenders) == ["a\nConfig(1)"]
    assert built == [("a", True), ("b", True), ("a", False), ("b", False)], "all are compiled before one is launched"


def test_rows_are_counted_in_powers_of_two() -> None:
    assert [tune.rows_class(m) for m in (0, 1, 2, 3, 4, 5, 1000)] == [1, 1, 2, 4, 4, 8, 1024]


def test_no_triton_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "why_no_triton", lambda: "Triton is not installed: install triton>=3.6")
    choice = choose(problem(1), GPUS["sm_90"])
    assert choice.taken is None
    assert {reason for _, reason in choice.rejected} == {"Triton is not installed: install triton>=3.6"}
    with pytest.raises(UnsupportedError, match="install triton"):
        choose(problem(1, compute="int8"), GPUS["sm_90"])
    found = explain(1, 64, 64, "q4_0", device="sm_90")
    assert "torch dequantizes" in str(found)  # as on a machine with that GPU
    monkeypatch.setattr(explain_gpu, "why_no_triton", rules.why_no_triton)
    with pytest.raises(UnsupportedError, match="which kernels sm_90 has is not known here: Triton is not installed"):
        explain(1, 64, 64, "q4_0", device="sm_90")


@pytest.mark.parametrize(("fmt", "packed"), [("iq4_nl", "int8_g32"), ("int6_g16", "int8_g16"), ("mxfp4", "mxfp4"), ("q4_0", "q4_0")])
def test_codes_that_gpus_hold_as_integers_are_explained_as_such(fmt: str, packed: str) -> None:
    assert str(packed_format(as_format(fmt), on_cpu=False)) == packed
    assert str(explain(1, 64, 64, fmt, device="sm_90").problem.format) == packed


@pytest.mark.parametrize("fmt", ["q4_0", "int4_g48_offset", "int8_channel"])
def test_what_runs_without_triton_is_right(fmt: str) -> None:
    asked = dataclasses.replace(problem(5, 33, 100, fmt, dtype=torch.bfloat16), paired=fmt == "int8_channel")
    codes = absmax(torch.randn(33, 100), asked.format)
    x, bias, residual = torch.randn(5, 100).to(torch.bfloat16), torch.randn(33), torch.randn(5, 33).to(torch.bfloat16)
    out = torch.full((5, 33), torch.nan, dtype=torch.bfloat16)
    plain.linear(asked, x, gpu_tiles.pack(codes, paired=asked.paired).data, out, Epilogue(bias, residual, -1.0, 2.0))
    expected = (reference.linear(x, codes, bias) + residual.double()).clamp(-1, 2)
    assert reference.agrees(out, expected, reference.error_bound(x, codes, bias, residual=residual)).all()


def test_bytes_are_paired_on_hopper() -> None:
    wanted = {"q8_0": True, "int8_channel": True, "int8_g33_zp": False, "q4_0": False}  # what wgmma takes as bytes, without gaps
    for arch in GPUS:
        for fmt, paired in wanted.items():
            assert rules.packs_code_pairs(as_format(fmt), (64, 256), GPUS[arch]) == (paired and arch == "sm_90")
    here, there = (explain(8, 64, 256, "q8_0", device=arch).to_json() for arch in ("sm_90", "sm_80"))
    assert here["weight_bytes"] == there["weight_bytes"] + 256


def test_explain() -> None:
    found = explain(1, 4096, 4096, "int4_g128", dtype=torch.float16, device="sm_80")
    assert isinstance(found, GpuExplanation)
    said = found.to_json()
    assert said["expected_from"] == "prediction"
    assert said["kernel"] in str(found)
    assert set(said["rejected"]) | {said["kernel"]} == {candidate.name for candidate in rules.GPU_LINEAR if not candidate.sparse}
    json.dumps(said)
    known = explain(1, 4096, 4096, "int4_g128", dtype=torch.bfloat16, device="sm_90")
    assert f"measured on {known.to_json()['measured_on']}" in str(known)
    with pytest.raises(ArgumentError, match="unknown activation"):
        explain(1, 64, 64, "q4_0", device="sm_90", activation="tensor")


@pytest.mark.parametrize(("rows", "taken"), [(1, "grouped"), (100, "grouped"), (9999, "grouped_hopper")])
def test_explain_experts(rows: int, taken: str) -> None:
    found = explain(rows, 1024, 1024, "int4_g128", dtype=torch.bfloat16, device="sm_90", experts=8)
    said = found.to_json()
    assert (said["op"], said["experts"], said["kernel"], said["expected_from"]) == ("grouped_linear", 8, taken, "prediction")
    assert set(said["rejected"]) | {taken} == {candidate.name for candidate in rules.GPU_GROUPED}
    assert (
        said["weight_bytes"] == 8 * explain(rows, 1024, 1024, "int4_g128", dtype=torch.bfloat16, device="sm_90").to_json()["weight_bytes"]
    )
    read = min(rows, 8) * said["weight_bytes"] // 8 + 2 * rows * 2048
    assert said["roofline"]["nbytes"] == read
    assert "8 experts of [1024, 1024]" in str(found)
    integers = explain(rows, 1024, 1024, "int4_g128", dtype=torch.bfloat16, device="sm_90", experts=8, compute="int8")
    assert integers.to_json()["kernel"] == (taken if rows < 9999 else "grouped_int8_hopper")
    assert ("activations scaled per block" in str(integers)) == (rows == 9999)


@pytest.mark.parametrize(
    ("experts", "n", "k", "rows", "measured"), [(8, 28672, 4096, 2, 47), (8, 28672, 4096, 1024, 583), (128, 1536, 2048, 64, 42)]
)
def test_predictions_of_experts(experts: int, n: int, k: int, rows: int, measured: float) -> None:
    """Of times of an H100, in µs: near enough to plan by."""
    asked = Problem("grouped_linear", rows, n, k, as_format("int4_g128"), torch.bfloat16, experts=experts)
    choice = choose(asked, GPUS["sm_90"])
    assert choice.taken is not None
    assert measured / 1.5 < choice.taken.seconds * 1e6 < measured * 1.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_explain_experts_here() -> None:
    found = explain(16, 512, 512, "int4_g128", dtype=torch.bfloat16, device="cuda", experts=4)
    assert isinstance(found, GpuExplanation)
    assert found.measured is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_explain_and_tune_here() -> None:
    from halfbyte.dispatch.measure import tune_linear

    found = explain(1, 512, 512, "int4_g128", dtype=torch.float16, device="cuda")
    assert isinstance(found, GpuExplanation)
    assert found.measured is not None
    assert found.launcher == "direct"
    asked = problem(3, 512, 512)
    times = tune_linear(asked, found.gpu)
    assert times == tune_linear(asked, found.gpu, anew=False)
    taken = choose(asked, found.gpu).taken
    assert taken is not None
    assert taken.measured


def test_4_bit_floats_have_no_integers() -> None:
    said = r"NVIDIA H\w+ solves linear of mxfp4 and torch.float32 with compute='int8' .* use compute='float'$"
    with pytest.raises(UnsupportedError, match=said):
        explain(7, 64, 64, "mxfp4", dtype=torch.float32, compute="int8", device="sm_90")
