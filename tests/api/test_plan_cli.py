"""`longlens plan kv` as people and programs call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from api.cli import main


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["plan", "kv", *arguments])
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
    code, out, _ = _run(capsys, "llama-3.1-70b", "--device", "8xH100", "--json", "--context", "8k")
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
        (("llama-3.1-8b", "--context", "0"), "make no plan"),
    ],
)
def test_mistakes_end_with_a_message(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = _run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("longlens: ")
    assert says in err


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys\nfrom api.cli import main\n"
        "try: main(['plan', 'kv', 'llama-3.1-8b'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0
