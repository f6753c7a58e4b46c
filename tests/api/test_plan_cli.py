"""`longlens plan` as people and programs call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from api.cli import main
from api.plan_show import written
from tests.api.folders import vision_folder


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return _plan(capsys, "kv", *arguments)


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    return int(str(end.value.code)), out, err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "llama-3.1-70b", "--device", "8xH100", "--host-kv-gib", "512")
    assert code == 0
    assert "llama-3.1-70b on 8 x H100" in out
    assert "KV per token   327,680 bytes\n" in out
    assert "2,956,079 with 512 GiB of the host" in out
    rows = [line.split() for line in out.splitlines()]
    assert [
        "131,072",
        "42.95",
        "GB",
        "9",
        "21",
        "107",
        "ms",
        "215",
        "ms",
        "13.0",
        "s",
        "706",
    ] in rows
    assert len({len(line) for line in out.splitlines() if line.rstrip().endswith("706")}) == 1
    assert all(len(line) <= 100 for line in out.splitlines())


def test_json_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(
        capsys, "llama-3.1-70b", "--device", "8xH100", "--json", "--context", "8k,8192"
    )
    plan = json.loads(out)
    assert code == 0
    assert plan["kv_bytes_per_token"] == 327_680
    assert [(c["tokens"], c["users"]) for c in plan["contexts"]] == [(8192, 156)]


def test_a_folder_with_windows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = _run(capsys, str(tmp_path), "--device", "L4", "--context", "32k")
    assert code == 0
    assert "Sliding windows let the last token see 0.54 GB of the largest." in out


def test_what_does_not_fit_and_what_is_stored_often(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(capsys, "llama-3.1-405b")
    assert "the weights do not fit: 741.7 GB are missing" in out
    _, out, _ = _run(capsys, "deepseek-v3", "--device", "8xH200", "--weights", "fp8")
    assert "562,176 bytes, stored 8 times" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing",), "'nothing' is neither a folder"),
        (("llama-3.1-8b", "--device", "H1"), "device 'H1' is not known"),
        (("llama-3.1-8b", "--context", "8k,many"), "--context '8k,many' is no list"),
        (("llama-3.1-8b", "--weights", "q7"), "weights 'q7' has no known size"),
        (("llama-3.1-8b", "--context", "0"), "context is 0; it must be from 1 to 131,072"),
        (("smollm2-135m", "--context", "8k,32k"), "32,768; it must be from 1 to 8,192: smollm2"),
        (("llama-3.1-8b", "--host-kv-gib", "-1"), "--host-kv-gib is -1; give GiB of host memory"),
        (("llama-3.1-8b", "--host-kv-gib", "nan"), "--host-kv-gib is nan"),
        (("llama-3.1-8b", "--context", "9" * 400), "is no list of lengths"),
        (("llama-3.1-8b", "--device", "5000xH100"), "counts 5,000; give a number from 1 to 4,096"),
    ],
)
def test_mistakes_end_with_a_message(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = _run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("longlens: ")
    assert says in err


def test_no_row_beyond_a_models_own_length(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "smollm2-135m", "--device", "L4")
    rows = [line.split()[0] for line in out.splitlines() if line.endswith("460")]
    assert (code, rows) == (0, ["8,192"])
    assert "one request    at most 839,017 tokens on the device\nthe model      8,192 tok" in out


VERBS = (
    ("roofline", "llama-3.1-8b"),
    ("prefill", "llama-3.1-8b"),
    ("users", "llama-3.1-70b", "--device", "8xH100"),
    ("speculate", "llama-3.1-8b", "--draft-model", "smollm2-135m"),
    ("quantize", "llama-3.1-8b"),
    ("disaggregate", "llama-3.1-8b"),
    ("lora", "llama-2-7b"),
    ("moe", "deepseek-v3", "--device", "8xH200", "--weights", "fp8"),
    ("images", "qwen2-vl-7b"),
    ("fleet", "llama-3.1-8b", "--rate", "1000"),
    ("batching", "llama-3.1-8b"),
)


@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: arguments[0])
def test_each_verb_says_formulas_numbers_and_where_it_turns(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out, err = _plan(capsys, *arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert any(line.startswith("  ") and " = " in line for line in lines)
    assert any(line.startswith("Binds: ") for line in lines)
    assert any(line.startswith("Turns: ") for line in lines)
    assert max(map(len, lines)) <= 130
    code, out, err = _plan(capsys, *arguments, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert set(told) == {
        *("planner", "title", "formulas", "values", "tables", "binds", "reverses", "curve")
    }
    assert told["planner"] == arguments[0]
    assert told["curve"]["lines"]


def test_numbers_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("prefill", "llama-3.1-70b", "--device", "8xH100", "--ttft", "200ms")
    _, out, _ = _plan(capsys, *arguments)
    assert "longest prompt within 200 ms              4,315 tokens" in out
    assert "rate F                                    3.17 PFLOP/s (0.4 (mfu) of the dense" in out
    words = [line.split() for line in out.splitlines()]
    assert ["131,072", "5.84", "s", "7.11", "s", "13.0", "s", "10,119"] in words
    _, out, _ = _plan(capsys, *arguments, "--json")
    told = json.loads(out)
    assert told["values"]["longest_prompt_within_200_ms_tokens"] == 4315
    last = told["tables"][0]["rows"][-1]
    assert last["prompt_tokens"] == 131_072
    assert last["prefill_s"] == pytest.approx(13.0, rel=0.01)
    assert last["rate_tokens_per_s"] == pytest.approx(10_119, rel=0.001)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "-"),
        ("tp8", "", "tp8"),
        (0, "", "0"),
        (57.4, "", "57.4"),
        (0.5621, "", "0.562"),
        (1234.5, "", "1,234"),
        (327_680.0, "bytes", "327,680 B"),
        (42.96e9, "bytes", "43.0 GB"),
        (1.5e15, "flop", "1.50 PFLOP"),
        (3.35e12, "bytes/s", "3.35 TB/s"),
        (0.0184, "share", "1.84 %"),
        (2.35, "share", "235 %"),
        (2.444, "times", "2.44x"),
        (0.00532, "s", "5.32 ms"),
        (0.185, "s", "185 ms"),
        (1.46, "s", "1.46 s"),
        (13.02, "s", "13.0 s"),
    ],
)
def test_units(value: float | str | None, unit: str, text: str) -> None:
    assert written(value, unit) == text


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        # Published for 448 x 448, 1024 x 1024, 1920 x 1080 and 1786 x 2526 pixels.
        (("qwen2-vl-7b",), [256, 1369, 2691, 5760]),
        (("qwen2.5-vl-7b",), [256, 1369, 2691, 5760]),
        (("qwen3-vl-8b",), [196, 1024, 2040, 4424]),
        (("qwen3-vl-2b",), [196, 1024, 2040, 4424]),
        (("qwen2-vl-7b", "--size", "3840x2160"), [10_549]),
        (("qwen3-vl-2b", "--size", "3840x2160"), [8160]),
    ],
)
def test_tokens_of_images(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], tokens: list[int]
) -> None:
    _, out, _ = _plan(capsys, "images", *arguments, "--json")
    rows = json.loads(out)["tables"][0]["rows"]
    assert [row["tokens"] for row in rows] == tokens


def test_operations_of_tower_and_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    """TFLOP of Qwen3-VL-2B: 4.3 and 3.0 at 1024 x 1024, 126 and 31 at 3840 x 2160; of the 8B 5.8
    and 14.5."""
    _, out, _ = _plan(capsys, "images", "qwen3-vl-2b", "--size", "1024x1024,3840x2160", "--json")
    found = [
        row[key] / 1e12
        for row in json.loads(out)["tables"][0]["rows"]
        for key in ("tower_flop", "prefill_flop")
    ]
    assert found == pytest.approx([4.3, 3.0, 126, 31], rel=0.012)
    _, out, _ = _plan(capsys, "images", "qwen3-vl-8b", "--size", "1024x1024", "--json")
    (row,) = json.loads(out)["tables"][0]["rows"]
    assert row["prefill_flop"] / 1e12 == pytest.approx(14.5, rel=0.01)


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_images_of_a_folder(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / name
    vision_folder(name, folder)
    capsys.readouterr()
    code, out, err = _plan(capsys, "images", str(folder), "--size", "448x448", "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["tables"][0]["rows"]
    assert row["tokens"] > 0
    assert row["tower_flop"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("roofline", "llama-3.1-405b"), "811.7 GB of bf16 weights do not fit 1 x H100 of 80 GB"),
        (("roofline", "llama-3.1-8b", "--context", "many"), "--context 'many' is no whole number"),
        (("prefill", "llama-3.1-8b", "--ttft", "200"), "--ttft: 200 lacks its unit"),
        (("prefill", "llama-3.1-8b", "--ttft", "0"), "ttft is 0"),
        (("speculate", "llama-3.1-8b", "--tree", "a"), "--tree 'a' is no list of lengths"),
        (("speculate", "llama-3.1-8b", "--accepted", "eagle"), "is no list such as ngram=1.9"),
        (("speculate", "llama-3.1-8b", "--draft-model", "x"), "'x' is neither a folder"),
        (("moe", "llama-3.1-8b"), "llama-3.1-8b has no experts"),
        (("images", "llama-3.1-8b"), "llama-3.1-8b sees no images; of the known shapes qwen2-vl"),
        (("images", "qwen2-vl-7b", "--size", "10"), "--size '10' is no list of sizes"),
        (("images", "qwen2-vl-7b", "--size", "0x9"), "--size '0x9' is no list of sizes"),
        (("images", "qwen2-vl-7b", "--size", "1x1000"), "1 x 1000 pixels"),
        (("fleet", "llama-3.1-8b", "--tpot", "1ms"), "tpot is 1 ms, but one sequence takes"),
        (("lora", "llama-3.1-8b", "--targets", "mlp"), "targets is 'mlp'"),
    ],
)
def test_mistakes_of_other_verbs(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = _plan(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("longlens: ")
    assert says in err


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _plan(
        capsys, "roofline", "smollm2-135m", "--device", "this", "--context", "100", "--json"
    )
    assert code == 0
    assert json.loads(out)["values"]["bandwidth_bw_bytes_per_s"] > 1e8


class _NoMatplotlib:
    def find_spec(self, name: str, *_: object) -> None:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)


def test_pictures_need_matplotlib_and_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoMatplotlib(), *sys.meta_path])
    file = tmp_path / "plan.png"
    code, out, err = _plan(capsys, "prefill", "llama-3.1-8b", "--plot", str(file))
    assert (code, out, file.exists()) == (1, "", False)
    assert "--plot needs matplotlib" in err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: arguments[0])
def test_pictures(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    code, _, err = _plan(capsys, *arguments, "--plot", str(file))
    assert (code, err) == (0, "")
    with Image.open(file) as picture:
        assert picture.width >= 900
        # Lines, words and a grid on white.
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50


def test_a_page_has_the_picture_and_the_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.html"
    code, _, _ = _plan(capsys, "users", "llama-3.1-70b", "--device", "8xH100", "--plot", str(file))
    page = file.read_text()
    assert code == 0
    assert "<svg" in page
    assert "Memory. With tp8 weights take" in page
    assert "http://www.w3.org/2000/svg" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("name", "says"), [("plan.gif", ".png or .html"), ("none/plan.png", "no folder")]
)
def test_pictures_that_cannot_be_written(
    name: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    code, out, err = _plan(capsys, "prefill", "llama-3.1-8b", "--plot", str(file))
    assert (code, out) == (1, "")
    assert says in err


def test_planning_is_quick_and_loads_no_torch() -> None:
    """Under two seconds of processor time (other work on the machine does not count), and neither
    torch nor transformers nor matplotlib is imported."""
    code = (
        "import resource, sys\nfrom api.cli import main\n"
        "for verb in {verbs!r}:\n"
        "    try: main(['plan', *verb])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "loaded = {{'torch', 'transformers', 'matplotlib'}} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "assert used.ru_utime + used.ru_stime < 2, used\n"
    ).format(verbs=[*VERBS, ("kv", "llama-3.1-8b")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
